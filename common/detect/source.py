"""A config with its few always-needed parts read once: class names, types, the nested text config.

Knows where those parts sit, no checkpoint family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from common.detect.fields import MAX_INT, Config, is_int, section
from common.detect.refusal import refuse, show, typed

_MAX_NAME_LEN = 200  # characters


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

    def loose_size(self, key: str) -> int | None:
        """For models that are only described: anything but a positive int is None."""
        for body in (self.config, self.text):
            value = body.get(key)
            if is_int(value) and 0 < value <= MAX_INT:
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
    if not isinstance(value, list | tuple) or not all(is_name(v) for v in value):
        raise refuse(
            "E24",
            f"`{path}` is {typed(value)}, not a list of class names.",
            f'`{path}` as a list such as ["Qwen3DSparkModel"]',
        )
    return tuple(value)


def _text(body: Config, key: str, path: str) -> str | None:
    value = body.get(key)
    if value is None or is_name(value):
        return value
    raise refuse(
        "E24", f"`{path}` is {typed(value)}, not a name.", f"`{path}`: the family, e.g. 'qwen3'"
    )


def is_name(value: object) -> TypeGuard[str]:
    """A string fit to be shown and logged as it is."""
    return isinstance(value, str) and len(value) <= _MAX_NAME_LEN and value.isprintable()
