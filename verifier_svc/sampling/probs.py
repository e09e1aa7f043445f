"""Temperature, min-p, top-k and top-p: from logits to the distribution that tokens are drawn from.

Batched over rows with values per row. What is kept is always "every logit at or above a threshold":
tokens of equal logit stay or go together, so the result never depends on how a sort orders them. A
row's result never depends on its neighbours.
"""

from collections.abc import Sequence

import torch

from verifier_svc.request import SamplingParams
from verifier_svc.sampling.rowwise import sort_descending


def target_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """logits: [N, vocab] fp32, overwritten; params: one per row, none greedy. Returns [N, vocab].

    Order, as in vLLM: temperature, min-p, top-k of what min-p left, top-p of what both left; then
    rows sum to 1.
    """
    logits.div_(_column([p.temperature for p in params], logits))
    vocab_size = logits.shape[1]
    top_k = [p.top_k or vocab_size for p in params]
    if any(p.min_p > 0.0 for p in params):
        shares = _column([p.min_p for p in params], logits)
        _keep_from_(logits, logits.amax(1, keepdim=True) + shares.log())
    if any(p.top_p < 1.0 for p in params):
        top_p = [p.top_p for p in params]
        _keep_from_(logits, _nucleus_threshold(sort_descending(logits), top_k, top_p))
    elif min(top_k) < vocab_size:
        most = max(k for k in top_k if k < vocab_size)
        _keep_from_(logits, _top_k_threshold(logits.topk(most).values, top_k))
    return logits.softmax(1)


def _keep_from_(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    """logits: [N, vocab], changed in place; threshold: [N, 1], the least logit that stays."""
    logits.masked_fill_(logits < threshold, -torch.inf)


def _top_k_threshold(ordered: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """ordered: each row's largest logits, descending -> [N, 1]: the k-th, -inf if k is beyond."""
    last = torch.tensor([[k - 1] for k in top_k], device=ordered.device)
    kth = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    return kth.masked_fill_(last >= ordered.shape[1], -torch.inf)


def _nucleus_threshold(
    ordered: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """ordered: all logits of each row, descending -> [N, 1]: the last that top-k and top-p keep.

    The token with which the running sum reaches top_p is still kept.
    """
    vocab_size = ordered.shape[1]
    kth = _top_k_threshold(ordered, top_k)
    kept = ordered if min(top_k) >= vocab_size else ordered.where(ordered >= kth, -torch.inf)
    wanted = _column(top_p, ordered, torch.float64)
    last = torch.searchsorted(kept.softmax(1).cumsum(1, dtype=torch.float64), wanted)
    reached = ordered.gather(1, last.clamp_(max=vocab_size - 1))
    return torch.maximum(kth, reached.masked_fill_(wanted >= 1.0, -torch.inf))


def _column(
    values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
