"""Where a request's text and tokens end: one cursor per request, fed one token at a time.

A block of accepted drafts goes through the same cursor, token by token, so that speculation cannot
change where a stream stops. Pure but for the text decoder that it is handed.

Rules: the first min_tokens tokens cannot end a request, except by length. EOS and stop ids come
before stop strings, and these before length. A stop string matches in the text as read character by
character: the match that ends first wins, the longest of those that end together. Text is held back
while it could be the beginning of a stop string.
"""

from collections.abc import Iterable
from typing import Protocol

from verifier_svc.request import FinishReason, Request


class TextDecoder(Protocol):
    """Token ids to text as they come: final pieces, never half a character."""

    def push(self, token_id: int) -> str:
        """The text that became final with this token."""
        ...

    def flush(self) -> str:
        """What was held back; the decoder is not used afterwards."""
        ...


class StopCursor:
    """Reads `request.token_ids` as they are appended; writes finish_reason and matched_stop."""

    def __init__(self, request: Request, decoder: TextDecoder) -> None:
        self._request = request
        self._decoder = decoder
        self._held = ""  # could be the beginning of a stop string
        stopping = request.stopping
        self._stop_strings = stopping.stop_strings
        self._stop_ids = frozenset(stopping.stop_token_ids)
        self._eos_ids = frozenset() if stopping.ignore_eos else request.eos_token_ids

    def push(self, token_id: int) -> str:
        """Appends one token to the request; returns the text that is final now.

        Sets `request.finish_reason` if the request ends here; no further token may be pushed then.
        """
        request, stopping = self._request, self._request.stopping
        assert request.finish_reason is None, (request.request_id, request.finish_reason)
        request.token_ids.append(token_id)
        may_stop = request.num_output > stopping.min_tokens
        if may_stop and token_id in self._eos_ids:
            request.finish_reason = FinishReason.EOS
        elif may_stop and token_id in self._stop_ids:
            request.finish_reason = FinishReason.STOP_TOKEN
        if request.finish_reason is not None:
            return ""  # the ids that end a request have no text
        text = self._decoder.push(token_id)
        if self._stop_strings:
            text = self._scan(text, may_stop)
        if request.finish_reason is None and len(request.token_ids) >= request.max_len:
            within = request.num_output < stopping.max_tokens
            request.finish_reason = FinishReason.CONTEXT_FULL if within else FinishReason.MAX_TOKENS
        return text

    def ends_by_id(self, token_ids: Iterable[int]) -> bool:
        """One of these tokens, pushed next, would end the request, whatever its text."""
        first = self._request.num_output + 1
        return any(
            token_id in self._eos_ids or token_id in self._stop_ids
            for num_output, token_id in enumerate(token_ids, start=first)
            if num_output > self._request.stopping.min_tokens
        )

    def flush(self) -> str:
        """Text held back until the end; a stop string in it still counts and cuts it."""
        request = self._request
        if request.finish_reason is FinishReason.STOP_STRING:
            return ""
        text = self._decoder.flush()
        if not self._stop_strings:
            return text
        return self._scan(text, request.num_output > request.stopping.min_tokens) + self._held

    def _scan(self, piece: str, may_stop: bool) -> str:
        """Adds a piece; returns what is final and keeps the rest in `_held`."""
        text = self._held + piece
        if may_stop and (match := self._first_match(text, len(self._held))):
            end, stop = match
            self._held = ""
            self._request.finish_reason = FinishReason.STOP_STRING
            self._request.matched_stop = stop
            return text[: end if self._request.stopping.include_stop_str else end - len(stop)]
        num_held = self._num_open(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """End and string of the match that ends first, and not within the first `num_old`."""
        found = []
        for stop in self._stop_strings:
            at = text.find(stop, max(0, num_old - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), -len(stop), stop))
        return (min(found)[0], min(found)[2]) if found else None

    def _num_open(self, text: str) -> int:
        """Length of the longest suffix that is a proper beginning of a stop string."""
        longest = max(map(len, self._stop_strings)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(len(s) > len(tail) and s.startswith(tail) for s in self._stop_strings):
                return len(text) - start
        return 0
