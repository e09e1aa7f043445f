"""DSpark's sequential heads: what the previous token adds to a row's logits, and the confidence.

Paper arXiv 2607.05147 and the public DeepSpec code: W1 is indexed by target ids, W2 gives logits
over the draft vocabulary. `rnn` carries a state through one block; its bias uses the output gate of
the same step, not the updated state. Batched over requests, one call per block row.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.loading.safetensors_files import Checkpoint
from common.nn.linear import Linear


class MarkovHead(Protocol):
    """One step: from the previous token, the row and the state, a bias on the row's logits."""

    def start_state(self, num_requests: int) -> Tensor | None:
        """The state before the first row of a block: zero, or nothing to carry."""
        ...

    def bias(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """embedding: W1 of previous tokens [R, rank]; hidden [R, d] -> bias [R, V_draft], state."""
        ...


class VanillaHead:
    """W2 · e."""

    def __init__(self, weights: Checkpoint, rank: int, hidden_size: int, draft_vocab: int) -> None:
        self.rank = rank
        self.w2 = Linear(weights.take("markov_head.markov_w2.weight", (draft_vocab, rank)))

    def start_state(self, num_requests: int) -> Tensor | None:
        """No state."""
        return None

    def bias(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead; `hidden` does not matter here."""
        return self.w2(embedding), None


class GatedHead(VanillaHead):
    """W2 · (sigmoid(G · [h ; e] + c) * e)."""

    def __init__(self, weights: Checkpoint, rank: int, hidden_size: int, draft_vocab: int) -> None:
        super().__init__(weights, rank, hidden_size, draft_vocab)
        self.gate_proj = _biased(weights, "markov_head.gate_proj", rank, hidden_size + rank)

    def bias(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead."""
        gate = self.gate_proj(torch.cat([hidden, embedding], dim=1)).sigmoid_()
        return self.w2(gate.mul_(embedding)), None


class RnnHead(VanillaHead):
    """z = [s ; e ; h]; gate, candidate, out = J · z + c; W2 · tanh(out)."""

    def __init__(self, weights: Checkpoint, rank: int, hidden_size: int, draft_vocab: int) -> None:
        super().__init__(weights, rank, hidden_size, draft_vocab)
        self.joint_proj = _biased(
            weights, "markov_head.joint_proj", 3 * rank, 2 * rank + hidden_size
        )
        self._like = weights.dtype, weights.device

    def start_state(self, num_requests: int) -> Tensor | None:
        """Zero; every block starts afresh."""
        dtype, device = self._like
        return torch.zeros(num_requests, self.rank, dtype=dtype, device=device)

    def bias(
        self, embedding: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See MarkovHead."""
        assert state is not None, "the rnn head needs the state of the row before"
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=1))
        gate, candidate, out = joint.chunk(3, dim=1)
        gate = gate.sigmoid()
        return self.w2(out.tanh()), gate * state + (1 - gate) * candidate.tanh()


HEADS: dict[str, type[VanillaHead]] = {
    "vanilla": VanillaHead,
    "gated": GatedHead,
    "rnn": RnnHead,
}


class ConfidenceHead:
    """A raw logit per row: sigmoid estimates P(draft accepted | those before it were)."""

    def __init__(self, weights: Checkpoint, width: int) -> None:
        self.weight = weights.take("confidence_head.proj.weight", (1, width))
        self.bias = weights.take("confidence_head.proj.bias", (1,))

    def __call__(self, features: Tensor) -> Tensor:
        """features [R, width] -> [R] float32."""
        return F.linear(features, self.weight, self.bias).squeeze(1).float()


def _biased(weights: Checkpoint, name: str, rows: int, cols: int) -> Linear:
    return Linear(
        weights.take(f"{name}.weight", (rows, cols)), weights.take(f"{name}.bias", (rows,))
    )
