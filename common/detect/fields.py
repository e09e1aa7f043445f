"""Reads one drafter field from every place a config may keep it, typed and conflict-checked.

Precedence (each engine reads some of these; none compares them): prefixed `dspark_*` in the chosen
body, `dspark_config`, plain keys at the top, `text_config`, `dflash_config`, `eagle_config`. Two
places that disagree are refused, because every engine silently picks another one.
Knows no checkpoint family.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard, TypeVar

from common.detect.refusal import refuse, show, typed
from common.errors import ConfigError

T = TypeVar("T")
Config = Mapping[str, Any]
Ids = tuple[int, ...]
Check = Callable[[str, object], T]

PREFIXED_KEYS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
)
AUX_KEY = "aux_hidden_state_layer_ids"
MAX_INT = 2**31 - 1  # ids and sizes of real checkpoints are far below; also bounds all arithmetic
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn", "ngram_attention")
_SECTIONS = ("dspark_config", "", "text_config", "dflash_config", "eagle_config")


def section(config: Config, key: str) -> Config:
    """The object at `key`, empty when absent or null.

    Raises:
        ConfigError: E24, the value is something else than an object.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse("E24", f"`{key}` is {typed(value)}, not an object.", f"remove `{key}`")
    return value


def whole(minimum: int, code: str = "E08", *, example: int = 1) -> Check[int]:
    """Checks for an int from `minimum` to MAX_INT. A bool, float or digit string is no int here.

    `example` is a released checkpoint's value, for the message.
    """

    def check(path: str, value: object) -> int:
        if is_int(value) and minimum <= value <= MAX_INT:
            return value
        raise refuse(
            code,
            f"`{path}` is {typed(value)}; it must be an integer of at least {minimum} (and below "
            "2**31).",
            f"set `{path}` to the value the checkpoint was trained with, such as {example}",
        )

    return check


def is_int(value: object) -> TypeGuard[int]:
    """An integer as JSON has it: true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def flag(path: str, value: object) -> bool:
    """Checks for a JSON true or false."""
    if not isinstance(value, bool):
        raise refuse("E08", f"`{path}` is {typed(value)}, not a boolean.", f"`{path}`: true")
    return value


def head_type(path: str, value: object) -> str:
    """Checks for the name of a known Markov head."""
    if not isinstance(value, str) or value not in MARKOV_HEAD_TYPES:
        allowed = ", ".join(MARKOV_HEAD_TYPES)
        raise refuse(
            "E08", f"`{path}` is {typed(value)}; known heads: {allowed}.", f"`{path}`: 'vanilla'"
        )
    return value


def tap_ids(lowest: int) -> Check[Ids]:
    """Checks a list of tapped layers and gives it as "output of layer i".

    Non-empty, integers, strictly increasing, none below `lowest` (-1: the embedding's output may be
    tapped). `aux_hidden_state_layer_ids` (speculators) counts hidden states, where 0 is the
    embedding's output, so it is one higher. The upper end needs the target's depth:
    `check_tap_range`.
    """

    def check(path: str, value: object) -> Ids:
        shift = 1 if path.endswith(AUX_KEY) else 0
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            problem = f"`{path}` is {typed(value)}, not a list"
        elif not value:
            raise refuse(
                "E08",
                f"`{path}` is empty: a DSpark drafter needs at least one tapped layer.",
                f"restore `{path}` from the original config.json, such as [40, 41, 42] on V4-Flash",
            )
        elif strange := [i for i in value if not is_int(i)]:
            problem = f"`{path}` holds {typed(strange[0])}, not an integer"
        elif small := [i for i in value if i - shift < lowest]:
            problem = f"`{path}` holds {show(small[0])}; the lowest id allowed is {lowest + shift}"
        elif large := [i for i in value if i > MAX_INT]:
            problem = f"`{path}` holds {show(large[0])}, far above any layer number"
        elif bad := [b for a, b in pairwise(value) if b <= a]:
            problem = (
                f"`{path}` is {show(value)}: {show(bad[0])} does not increase on its neighbour"
            )
        else:
            return tuple(i - shift for i in value)
        raise refuse(
            "E14", f"{problem}.", f"`{path}` as strictly increasing layer numbers, e.g. [1, 9, 17]"
        )

    return check


def check_tap_range(ids: Ids, num_layers: int | None, path: str, origin: str) -> None:
    """Raises E14 for a tap past the target's last layer.

    `path` is where the taps were read, `origin` where the number of layers was.
    """
    if num_layers is None:
        return
    outside = [i for i in ids if i >= num_layers]
    if outside:
        written = f" (written as {show(outside[0] + 1)})" if path.endswith(AUX_KEY) else ""
        raise refuse(
            "E14",
            f"`{path}` taps layer {show(outside[0])}{written}, but `{origin}` gives the target "
            f"N = {show(num_layers)} layers.",
            f"taps from 0 to {show(num_layers - 1)}",
            "the config.json that belongs to this target",
        )


def check_filler(token_id: int | None, vocab_size: int | None, path: str, origin: str) -> None:
    """Raises E15 when the filler token is no row of the target's embedding; paths as above."""
    if token_id is None or vocab_size is None or token_id < vocab_size:
        return
    raise refuse(
        "E15",
        f"`{path}` is {show(token_id)}, outside the vocabulary: `{origin}` is {show(vocab_size)}.",
        f"a filler token from 0 to {show(vocab_size - 1)}, the one used in training",
    )


class Reader:
    """Typed reads of one config; `sources` collects where each value came from."""

    def __init__(self, config: Config, body: str = "") -> None:
        """`body` is where prefixed keys are expected first: "" (top level) or "text_config"."""
        self.sources: dict[str, str] = {}
        self._config = config
        sections = {name: section(config, name) for name in _SECTIONS if name}
        self._plain = [(name, sections[name] if name else config) for name in _SECTIONS]
        other = "" if body else "text_config"
        self._prefixed = [(name, sections[name] if name else config) for name in (body, other)] + [
            ("dspark_config", sections["dspark_config"])
        ]

    def read(self, field: str, check: Check[T], *keys: str) -> T | None:
        """The value of `field` under any of `keys` (prefixed names first), None when absent.

        Null counts as absent. Every place that has a value is checked, so that a broken value in a
        place of low precedence is not passed over.

        Raises:
            ConfigError: what `check` raises; E16 when two places differ.
        """
        return self._agreed(field, check, self._occurrences(keys))

    def size(self, field: str, key: str, *sections: str) -> int | None:
        """A positive size at `key` in any of `sections`, None when absent.

        A section is the name of a nested object, "" the top level; the first one takes precedence.
        For keys that mean another thing elsewhere in the file, so that `read` would look too far.

        Raises:
            ConfigError: E24, it is no positive integer; E16, two of the sections differ.
        """
        places = [
            (name, section(self._config, name) if name else self._config) for name in sections
        ]
        return self._agreed(field, whole(1, "E24"), _found_in(places, key))

    def default(self, field: str, value: T) -> T:
        """Takes `value` because no place has one; recorded as such."""
        self.sources[field] = "default"
        return value

    def _agreed(
        self, field: str, check: Check[T], occurrences: list[tuple[str, object]]
    ) -> T | None:
        found: tuple[str, T] | None = None
        for path, value in occurrences:
            checked = check(path, value)
            if found is None:
                found = path, checked
            elif checked != found[1]:
                raise conflict(*found, path, checked)
        if found is None:
            return None
        self.sources[field] = found[0]
        return found[1]

    def _occurrences(self, keys: tuple[str, ...]) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        for key in keys:
            found += _found_in(self._prefixed if key.startswith("dspark_") else self._plain, key)
        return found


def _found_in(places: list[tuple[str, Config]], key: str) -> list[tuple[str, object]]:
    """(path, value) of each place, a section's name and content, that has a value at `key`."""
    return [
        (f"{name}.{key}" if name else key, where[key])
        for name, where in places
        if where.get(key) is not None
    ]


def conflict(path: str, value: object, other_path: str, other: object) -> ConfigError:
    """The E16 error: two places of one config give different values."""
    return refuse(
        "E16",
        f"`{path}` is {show(value)} but `{other_path}` is {show(other)}; both mean the same thing.",
        f"keep the value the checkpoint was trained with and remove `{path}` or `{other_path}`",
    )
