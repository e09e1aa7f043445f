"""A config with its few always-needed parts read once: class names, types, the nested text config.

Knows where those parts sit, no checkpoint family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.detect.fields import Config, section, whole
from common.detect.refusal import refuse, show, typed


@dataclass(frozen=True, slots=True)
class Source:
    """`config` is the whole file, `text` its `text_config` (empty when it has none)."""

    config: Config
    text: Config
    name: str | None
    model_type: str | None
    text_model_type: str | None
    architectures: tuple[str, ...]

    @property
    def model_types(self) -> tuple[str, ...]:
        """The outer type, then the text body's, where given."""
        return tuple(t for t in (self.model_type, self.text_model_type) if t is not None)

    def size(self, key: str, *sections: str) -> int | None:
        """A positive size that this project will rely on, from the first of `sections` that has it.

        A section is the name of a nested object, "" the top level.

        Raises:
            ConfigError: E24, it is no positive integer.
        """
        return self.located_size(key, *sections)[0]

    def located_size(self, key: str, *sections: str) -> tuple[int | None, str]:
        """`size` and the path it was read at (`key` itself when nowhere)."""
        for name in sections:
            body = section(self.config, name) if name else self.config
            if body.get(key) is not None:
                path = f"{name}.{key}" if name else key
                return whole(1, "E24")(path, body[key]), path
        return None, key

    def loose_size(self, key: str) -> int | None:
        """Like `size` for models that are only described: anything but a positive int is None."""
        for body in (self.config, self.text):
            value = body.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None


def open_source(config: object, name: str | None) -> Source:
    """Reads the common parts.

    Raises:
        ConfigError: E20, no object or an empty one; E24, a part has the wrong type.
    """
    if not isinstance(config, Mapping) or not config:
        raise refuse(
            "E20",
            f"config.json of {show(name)} must hold a JSON object with keys; it holds "
            f"{typed(config)}.",
            "the config.json of a Hugging Face checkpoint, with at least `model_type`",
        )
    text = section(config, "text_config")
    return Source(
        config=config,
        text=text,
        name=name,
        model_type=_text(config, "model_type", "model_type"),
        text_model_type=_text(text, "model_type", "text_config.model_type"),
        architectures=class_names(config.get("architectures"), "architectures"),
    )


def class_names(value: Any, path: str) -> tuple[str, ...]:
    """A list of class names; absent or null is empty.

    Raises:
        ConfigError: E24.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise refuse(
            "E24",
            f"`{path}` is {typed(value)}, not a list of class names.",
            f'`{path}` as a list such as ["Qwen3DSparkModel"]',
        )
    return tuple(value)


def _text(body: Config, key: str, path: str) -> str | None:
    value = body.get(key)
    if value is None or isinstance(value, str):
        return value
    raise refuse(
        "E24", f"`{path}` is {typed(value)}, not a string.", f"`{path}`: the family, e.g. 'qwen3'"
    )
