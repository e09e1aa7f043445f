"""Temperature, top-k, top-p and min-p: from logits to the distribution that tokens are drawn from.

Batched over rows with a value per row. The kept set is always "everything at or above a threshold":
tokens of equal logit stay or go together, so the result never depends on how a sort orders them.
"""

from collections.abc import Sequence

import torch

from verifier_svc.request import SamplingParams

NUCLEUS_GUESS = 256  # most nuclei fit; a row that does not costs a full sort of the batch


def target_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """logits: [N, vocab] fp32, overwritten; params: one per row, none greedy. Returns [N, vocab].

    Order: temperature, top-k, top-p of what top-k left, min-p of that; then rows sum to 1.
    """
    vocab_size, device = logits.shape[1], logits.device
    logits.div_(_column([p.temperature for p in params], device))
    top_k = [p.top_k or vocab_size for p in params]
    if min(top_k) < vocab_size:
        _keep_top_k_(logits, top_k)
    probs = logits.softmax(1)
    threshold = torch.zeros_like(probs[:, :1])
    if any(p.top_p < 1.0 for p in params):
        threshold = _nucleus_threshold(probs, [p.top_p for p in params])
    if any(p.min_p > 0.0 for p in params):
        floor = _column([p.min_p for p in params], device) * probs.amax(1, keepdim=True)
        threshold = torch.maximum(threshold, floor)
    if any(p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        probs.mul_(probs >= threshold)
        # Rows without a limit stay as they are: a row must not depend on its neighbours.
        probs.div_(probs.sum(1, keepdim=True).masked_fill_(threshold == 0.0, 1.0))
    return probs


def _keep_top_k_(logits: torch.Tensor, top_k: list[int]) -> None:
    """A value of vocab_size keeps the whole row."""
    vocab_size = logits.shape[1]
    largest = max(k for k in top_k if k < vocab_size)
    best = logits.topk(largest, dim=1).values
    last = torch.tensor([min(k, largest) - 1 for k in top_k], device=logits.device)
    kth = best.gather(1, last[:, None])
    whole = torch.tensor([[k >= vocab_size] for k in top_k], device=logits.device)
    logits.masked_fill_((logits < kth) & ~whole, -torch.inf)


def _nucleus_threshold(probs: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """[N, 1]: probability of the last token needed to reach top_p; 0 for rows without a limit."""
    wanted = _column(top_p, probs.device, torch.float64)
    guess = min(NUCLEUS_GUESS, probs.shape[1])
    ordered = probs.topk(guess, dim=1).values
    reached = ordered.cumsum(1, dtype=torch.float64)
    limited = wanted < 1.0
    if bool((limited & (reached[:, -1:] < wanted)).any()):
        ordered = probs.sort(dim=1, descending=True).values
        reached = ordered.cumsum(1, dtype=torch.float64)
    # The first position whose running sum reaches top_p is still kept.
    last = (reached < wanted).sum(1, keepdim=True).clamp_(max=ordered.shape[1] - 1)
    return ordered.gather(1, last).mul_(limited)


def _column(
    values: list[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
