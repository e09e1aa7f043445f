"""How a refusal reads: one shape for every error, and values shown safely whatever they are.

Knows no rule. Codes are listed in `common.detect.api`.
"""

import reprlib

from common.errors import ConfigError

_MAX_INT_BITS = 256  # a longer one is named by its size: `repr` of a huge int is slow or raises


class _Bounded(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 160
        self.maxlist = self.maxtuple = 12
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return str(x) if bits <= _MAX_INT_BITS else f"an integer of {bits} bits"


_bounded = _Bounded()


def refuse(code: str, body: str, *hints: str) -> ConfigError:
    """The error to raise. `body` names key, value and what is allowed; each hint is one way out."""
    assert hints, f"{code}: a refusal without a way out"
    message = f"{body} What works: {'; or '.join(hints)}."
    return ConfigError(code, one_line(message), tuple(map(one_line, hints)))


def one_line(text: str) -> str:
    """`text` with line breaks, control codes and lone surrogates escaped.

    Class names and file names come from others; they must neither break a line nor steer a
    terminal, and every stream must be able to encode them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(value: object) -> str:
    """`value` as text, bounded in length and depth; never raises."""
    return _bounded.repr(value)


def typed(value: object) -> str:
    """`value` with its type, for messages about wrong types."""
    return f"{show(value)} ({type(value).__name__})"
