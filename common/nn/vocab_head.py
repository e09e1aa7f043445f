"""The output head in two parts, so that likely logits are known before the others are computed.

The ids of a byte-pair or SentencePiece vocabulary are in the order of its merges: the first third
makes up 93-95 % of what SmolLM2 writes (measured). Special tokens may come last, and then count as
unlikely. Knows neither norms nor requests.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.nn.linear import Linear

Midway = Callable[[Tensor], None]  # logits [N, vocab] of which only the likely ids' are there
NOT_YET = -1e20  # the others': below every real one, and unlike -inf it never makes a NaN


class VocabHead:
    """weight: [vocab, d]. Both parts are always computed apart, so that results do not depend on
    whether anybody looks at the first.
    """

    def __init__(self, weight: Tensor) -> None:
        self._vocab_size = weight.shape[0]
        self._num_likely = self._vocab_size // 3
        self._likely = Linear(weight[: self._num_likely])
        self._others = Linear(weight[self._num_likely :])

    def __call__(
        self, slices: Sequence[Tensor], num_rows: int, midway: Midway | None = None
    ) -> Tensor:
        """slices: normed rows, one product each; of all their rows the first `num_rows` count.

        Returns float32 [num_rows, vocab]; `midway` sees the same tensor, which it must not change
        or keep.
        """
        likely = _rows(self._likely, slices, num_rows)
        logits = likely.new_empty(num_rows, self._vocab_size, dtype=torch.float32)
        logits[:, : self._num_likely] = likely
        if midway is not None:
            logits[:, self._num_likely :] = NOT_YET
            midway(logits)
        logits[:, self._num_likely :] = _rows(self._others, slices, num_rows)
        return logits


def _rows(linear: Linear, slices: Sequence[Tensor], num_rows: int) -> Tensor:
    if len(slices) == 1:
        return linear(slices[0])[:num_rows]
    return torch.cat([linear(rows) for rows in slices])[:num_rows]
