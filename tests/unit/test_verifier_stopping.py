"""The stop cursor against a character-by-character reading of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.testing.no_text import NoText
from verifier_svc.request import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from verifier_svc.stopping import StopCursor

EOS, STOP_ID = 90, 91
PIECES = ["a", "b", "ab", "ba", "", "c", "abc", "bb"]  # the text of token i


class Pieces:
    """A decoder whose token i is PIECES[i]; `late` tokens' text comes out with the next token."""

    def __init__(self, late: frozenset[int] = frozenset()) -> None:
        self._late, self._held = late, ""

    def push(self, token_id: int) -> str:
        text = self._held + PIECES[token_id]
        self._held = text if token_id in self._late else ""
        return "" if token_id in self._late else text

    def flush(self) -> str:
        return self._held


def make(max_tokens: int = 50, max_len: int | None = None, **stops: object) -> Request:
    stopping = StopParams(max_tokens=max_tokens, **stops)  # type: ignore[arg-type]
    return Request(
        "r", 1, [0], 1, SamplingParams(), stopping, SpeculationParams(), frozenset({EOS}),
        max_len or 1 + max_tokens,
    )  # fmt: skip


def read(request: Request, tokens: list[int], late: frozenset[int] = frozenset()) -> list[str]:
    """Texts per token until the request ends, then the flushed rest."""
    cursor, texts = StopCursor(request, Pieces(late)), []
    for token in tokens:
        texts.append(cursor.push(token))
        if request.finish_reason is not None:
            break
    return [*texts, cursor.flush()]


def reference(request: Request, tokens: list[int]) -> tuple[str, int, FinishReason | None, str]:
    """Text, tokens used, reason, matched stop, reading one character at a time."""
    stopping, text = request.stopping, ""
    for count, token in enumerate(tokens, start=1):
        may_stop = count > stopping.min_tokens
        if may_stop and token == EOS and not stopping.ignore_eos:
            return text, count, FinishReason.EOS, ""
        if may_stop and token in stopping.stop_token_ids:
            return text, count, FinishReason.STOP_TOKEN, ""
        for character in PIECES[token]:
            text += character
            ended = [s for s in stopping.stop_strings if text.endswith(s)]
            if may_stop and ended:
                stop = max(ended, key=len)
                cut = 0 if stopping.include_stop_str else len(stop)
                return text[: len(text) - cut], count, FinishReason.STOP_STRING, stop
        if count == stopping.max_tokens:
            return text, count, FinishReason.MAX_TOKENS, ""
    return text, len(tokens), None, ""


@given(
    tokens=st.lists(st.sampled_from([*range(len(PIECES)), EOS, STOP_ID]), min_size=1, max_size=12),
    stop_strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 12),
    include=st.booleans(),
    stop_ids=st.sampled_from([(), (STOP_ID,)]),
)
@settings(max_examples=300, deadline=None)
def test_the_cursor_reads_as_if_character_by_character(
    tokens, stop_strings, min_tokens, max_tokens, include, stop_ids
) -> None:
    # ids that may not stop yet have no text here; the decoder of a real model knows their pieces
    tokens = [t if t < len(PIECES) or i >= min_tokens else 0 for i, t in enumerate(tokens)]
    if not stop_ids:
        tokens = [0 if t == STOP_ID else t for t in tokens]
    request = make(
        max_tokens,
        min_tokens=min_tokens,
        stop_strings=tuple(stop_strings),
        include_stop_str=include,
        stop_token_ids=stop_ids,
    )
    texts = read(request, tokens)
    text, count, reason, stop = reference(request, tokens)
    assert ("".join(texts), len(texts) - 1) == (text, count)
    assert (request.finish_reason, request.matched_stop) == (reason, stop)
    assert request.token_ids == [0, *tokens[:count]]


def test_text_that_may_begin_a_stop_is_held_back_no_longer_than_needed() -> None:
    request = make(stop_strings=("abc",))
    assert read(request, [0, 1, 1, 0, 0]) == ["", "", "abb", "", "a", "a"]


def test_a_stop_that_straddles_min_tokens_counts_one_before_it_does_not() -> None:
    straddling = make(stop_strings=("ab",), min_tokens=1)
    assert read(straddling, [0, 1]) == ["", "", ""]
    assert straddling.finish_reason is FinishReason.STOP_STRING
    before = make(stop_strings=("ab",), min_tokens=1)
    assert "".join(read(before, [2, 5])) == "abc"
    assert before.finish_reason is None


def test_a_stop_inside_text_that_the_decoder_held_until_the_end_still_cuts() -> None:
    request = make(max_tokens=2, stop_strings=("c",))
    assert read(request, [0, 5], late=frozenset({5})) == ["a", "", ""]
    assert request.finish_reason is FinishReason.STOP_STRING
    assert request.matched_stop == "c"


def test_context_and_max_tokens_are_told_apart() -> None:
    request = make(max_tokens=5, max_len=3)
    read(request, [0, 0, 0])
    assert request.finish_reason is FinishReason.CONTEXT_FULL and request.num_output == 2
    request = make(max_tokens=2)
    read(request, [0, 0, 0])
    assert request.finish_reason is FinishReason.MAX_TOKENS and request.num_output == 2


def test_stop_ids_come_before_length() -> None:
    request = make(max_tokens=1, stop_token_ids=(4,))
    assert read(request, [4]) == ["", ""]
    assert request.finish_reason is FinishReason.STOP_TOKEN


def test_nothing_may_follow_the_end() -> None:
    request = make(max_tokens=1)
    cursor = StopCursor(request, NoText())
    cursor.push(0)
    with pytest.raises(AssertionError):
        cursor.push(0)
