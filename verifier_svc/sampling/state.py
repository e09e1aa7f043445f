"""What sampling remembers of one request, and one request's rows inside a step.

Knows numpy, not torch: the tokens of a request are Python integers and stay on the host.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.noise import to_int64
from verifier_svc.drafting import Draft
from verifier_svc.request import Request

Ints = NDArray[np.int64]


class TokenHistory:
    """The distinct tokens of prompt and output and how often each was emitted; grows with them."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._index: dict[int, int] = {}  # token id -> column
        self._ids = np.empty(256, np.int64)
        self._counts = np.zeros(256, np.int64)  # in the output alone
        self._num_read = 0

    def block(self, draft_ids: tuple[int, ...]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """What each of the len(draft_ids) + 1 rows of a block has before it.

        Returns token ids [U], output counts [rows, U], and whether the token has been seen at all,
        in the prompt, the output or the drafts before the row [rows, U].
        """
        self._catch_up()
        num_known = len(self._index)
        new = [token for token in dict.fromkeys(draft_ids) if token not in self._index]
        columns = {token: num_known + i for i, token in enumerate(new)}
        num_rows = len(draft_ids) + 1
        ids = np.concatenate([self._ids[:num_known], np.array(new, np.int64)])
        counts = np.zeros((num_rows, len(ids)), np.int64)
        counts[:, :num_known] = self._counts[:num_known]
        for row, token in enumerate(draft_ids, start=1):
            column = self._index.get(token)
            counts[row:, columns[token] if column is None else column] += 1
        seen = counts > 0
        seen[:, :num_known] = True
        return ids, counts, seen

    def _catch_up(self) -> None:
        token_ids, num_prompt = self._request.token_ids, self._request.num_prompt
        for position in range(self._num_read, len(token_ids)):
            column = self._index.setdefault(token_ids[position], len(self._index))
            if column == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[column] = token_ids[position]
            self._counts[column] += position >= num_prompt
        self._num_read = len(token_ids)


class SamplingState:
    """Constants of a request in the form that a step needs; made once, kept while it lives."""

    def __init__(self, request: Request) -> None:
        params, stopping = request.sampling, request.stopping
        self.params = params
        self.seed = to_int64(params.seed)
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias_values = np.array([value for _, value in params.logit_bias], np.float32)
        stop_ids = set(stopping.stop_token_ids)
        if not stopping.ignore_eos:
            stop_ids |= request.eos_token_ids
        self.stop_ids = np.array(sorted(stop_ids), np.int64)
        self.min_tokens = stopping.min_tokens if stop_ids else 0
        self.history = TokenHistory(request) if params.has_penalties else None
        self.has_fixed_extras = bool(params.logit_bias) or params.has_penalties


@dataclass
class Block:
    """One request's rows of a step's logits: after its last known token and after each draft."""

    index: int  # of its entry in the plan
    request: Request
    state: SamplingState
    row: int  # first row in the step's logits
    draft: Draft | None
    draft_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.draft_ids = () if self.draft is None else self.draft.token_ids

    @property
    def num_rows(self) -> int:
        """Drafts and one more."""
        return len(self.draft_ids) + 1

    @property
    def position(self) -> int:
        """Of the token that the first row decides; noise is keyed by it."""
        return len(self.request.token_ids)

    @property
    def has_extras(self) -> bool:
        """Its logits are changed before anything is chosen from them."""
        state = self.state
        return state.has_fixed_extras or self.request.num_output < state.min_tokens
