"""Renders a checkpoint's own chat template; knows no tokenizer and no model."""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import LoadError


class ChatTemplate:
    """The `chat_template` of `tokenizer_config.json`, sandboxed: it comes with the weights."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises LoadError when the checkpoint has no usable template."""
        path = checkpoint / "tokenizer_config.json"
        try:
            self._config: dict[str, Any] = json.loads(path.read_text())
            source = self._config["chat_template"]
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            self._template = environment.from_string(source)
        except (OSError, ValueError, KeyError, TypeError, TemplateError) as error:
            raise LoadError(
                f"{path} holds no usable chat_template ({error!r}); "
                "send the prompt as plain text or token ids instead"
            ) from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """`messages` = [{"role": ..., "content": ...}]; the text ends where the answer starts."""
        tokens = {k: self._config.get(k) for k in ("bos_token", "eos_token", "pad_token")}
        return self._template.render(messages=messages, add_generation_prompt=True, **tokens)
