"""Draws from distributions with counter-based noise; log-probabilities of the raw distribution."""

from collections.abc import Sequence

import torch

from common.noise import TARGET, exponential
from verifier_svc.request import TokenLogprobs
from verifier_svc.sampling.rowwise import arg_max

RACE_ALL = 0.125  # above this share of possible tokens, noise for the whole vocabulary is as cheap


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """weights: [N, vocab] >= 0, not all zero, any scale; uniforms: [N] float64 -> [N] int64.

    Sums in float64: a token of weight 0 is never drawn and one of 1e-12 not out of turn.
    """
    running = weights.cumsum(1, dtype=torch.float64)
    at = uniforms[:, None] * running[:, -1:]
    return torch.searchsorted(running, at, right=True).clamp_(max=weights.shape[1] - 1).squeeze(1)


def race(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The coupled choice: arg-max of log-probs + Gumbel noise of (seed, position, token).

    probs: [N, vocab]; seeds, positions: [N] int64 -> [N] int64. Same probs and key: same token.
    """
    vocab_size = probs.shape[1]
    num_possible = int((probs > 0).sum(1).max())
    if num_possible > RACE_ALL * vocab_size:
        ids = torch.arange(vocab_size, device=probs.device)
        return arg_max(probs / exponential(seeds, positions, TARGET, ids))
    ids = probs.topk(num_possible, dim=1).indices.sort(1).values
    scores = probs.gather(1, ids) / exponential(seeds, positions, TARGET, ids)
    return ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)


def raw_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """For chosen rows of raw logits [N, vocab]: the chosen token's log-probability and the best."""
    chosen = logits[torch.tensor(rows, device=logits.device)]
    norm = chosen.logsumexp(1, keepdim=True)
    own = chosen.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - norm
    best = chosen.topk(min(max(num_top), logits.shape[1]), dim=1)
    top_logprobs, top_ids = (best.values - norm).tolist(), best.indices.tolist()
    return [
        TokenLogprobs(logprob, tuple(ids[:n]), tuple(values[:n]))
        for logprob, ids, values, n in zip(
            own.squeeze(1).tolist(), top_ids, top_logprobs, num_top, strict=True
        )
    ]
