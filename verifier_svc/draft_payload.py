"""From the bytes of one proposal to a Draft that can do no harm, or the reason why not.

Pure numpy. Nothing a drafter sends is trusted: lengths, ids, numbers and distributions are checked,
since verification divides by these probabilities and indexes by these ids.
"""

import numpy as np

from verifier_svc.drafting import Draft

SUM_TOLERANCE = 1e-3  # of each distribution; float32 softmax over 1024 candidates is within 1e-6


def read_draft(
    *,
    token_ids: bytes,
    confidence_logits: bytes,
    top_k: int,
    candidate_ids: bytes,
    candidate_probs: bytes,
    max_drafts: int,
    vocab_size: int,
    sampled: bool,
) -> Draft | str:
    """Field meanings as in drafter.proto `Proposal`; `sampled`: distributions were asked for."""
    if len(token_ids) % 4 or not 4 <= len(token_ids) <= 4 * max_drafts:
        return f"token_ids has {len(token_ids)} bytes for at most {max_drafts} int32"
    tokens = np.frombuffer(token_ids, "<i4")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"token ids {tokens.tolist()} leave 0..{vocab_size - 1}"
    num_drafts = len(tokens)
    confidences: tuple[float, ...] = ()
    if confidence_logits:
        if len(confidence_logits) != 4 * num_drafts:
            return f"confidence_logits has {len(confidence_logits)} bytes for {num_drafts} float32"
        logits = np.frombuffer(confidence_logits, "<f4")
        if not np.isfinite(logits).all():
            return f"confidence logits {logits.tolist()} are not finite"
        confidences = tuple(logits.tolist())
    if not sampled:
        if top_k or candidate_ids or candidate_probs:
            return f"{top_k} candidates per token for a draft that is not sampled"
        return Draft(tuple(tokens.tolist()), confidences)
    wanted = 4 * num_drafts * top_k
    if not top_k or len(candidate_ids) != wanted or len(candidate_probs) != wanted:
        return (
            f"{len(candidate_ids)} and {len(candidate_probs)} candidate bytes for "
            f"{num_drafts} tokens with {top_k} candidates"
        )
    ids = np.frombuffer(candidate_ids, "<i4").reshape(num_drafts, top_k).astype(np.int64)
    probs = np.frombuffer(candidate_probs, "<f4").reshape(num_drafts, top_k)
    fault = _fault(tokens, ids, probs, vocab_size)
    return fault or Draft(tuple(tokens.tolist()), confidences, ids, probs)


def _fault(tokens: np.ndarray, ids: np.ndarray, probs: np.ndarray, vocab_size: int) -> str | None:
    """What makes these candidates no distribution that the tokens can have come from."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        return f"candidate ids leave 0..{vocab_size - 1}"
    with np.errstate(invalid="ignore", over="ignore"):
        sums = probs.sum(1)
    if not (np.abs(sums - 1) <= SUM_TOLERANCE).all() or probs.min() < 0:  # NaN fails the first
        return f"candidate probabilities are negative or sum to {sums.tolist()}, not 1"
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "a candidate id comes twice in one distribution"
    if not ((ids == tokens[:, None]) & (probs > 0)).any(1).all():
        return "a token is not among its candidates, or has probability 0"
    return None
