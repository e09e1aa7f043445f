"""The paper's training loss and the acceptance figures that come with it.

Loss = 0.1·CE(true token) + 0.9·‖q − p‖₁ + 1.0·BCE(confidence, 1 − ½‖q − p‖₁), weighted by
exp(−(k − 1)/4) and divided by the sum of weights (DSpark paper; DeepSpec). q is the draft
distribution with its Markov bias, p the target's over the whole vocabulary: what p holds outside
the draft vocabulary counts fully in the L1 distance. A true token outside the draft vocabulary has
no cross entropy.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
CHUNK = 128  # rows whose float32 logits fit the processor's cache
DECAY = 4.0  # DeepSpec's `loss_decay_gamma`; not the block size


@dataclass
class LossParts:
    """`loss` carries the gradient; the rest is detached. distance: [A, B], ‖q − p‖₁ per row."""

    loss: Tensor
    cross_entropy: Tensor
    mean_distance: Tensor
    confidence: Tensor
    distance: Tensor


class _Distribution(torch.autograd.Function):
    """Sum of w·(0.1·CE + 0.9·L1) over rows, with its gradient formed in the forward pass.

    Autograd's own chain would keep five float32 copies of the logits; this keeps one in bf16.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,
        target_probs: Tensor,
        labels: Tensor,
        weights: Tensor,
        distill: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.empty_like(logits)
        cross_entropy, distance = torch.empty(len(logits)), torch.empty(len(logits))
        for low in range(0, len(logits), CHUNK):
            some = slice(low, low + CHUNK)
            cross_entropy[some], distance[some], grad[some] = _chunk(
                logits[some].float(),
                target_probs[some].float(),
                labels[some],
                weights[some],
                distill,
            )
        total = (weights * (CE_WEIGHT * cross_entropy + L1_WEIGHT * distance)).sum()
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(cross_entropy, distance)
        return total, cross_entropy, distance

    @staticmethod
    def backward(ctx, grad_total, *_unused):  # type: ignore[no-untyped-def]
        (grad,) = ctx.saved_tensors
        return grad * grad_total.to(grad.dtype), None, None, None, None


def _chunk(
    logits: Tensor, target_probs: Tensor, labels: Tensor, weights: Tensor, distill: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy [n], L1 distance [n] and the gradient [n, V_draft] of the weighted sum."""
    rows = torch.arange(len(logits))
    draft_probs = logits.softmax(-1)
    known = labels >= 0
    places = labels.clamp(min=0)
    cross_entropy = -draft_probs[rows, places].clamp(min=1e-30).log() * known
    gap = draft_probs - target_probs
    mass = target_probs.sum(-1)
    distance = gap.abs().sum(-1) + (1 - mass).clamp(min=0)
    # d L1 / d z_j = q_j (s_j − Σ q_i s_i), s the sign of q − p;  d CE / d z_j = q_j − [j = label]
    signs = gap.sign_()
    signs.sub_((draft_probs * signs).sum(-1, keepdim=True)).mul_(L1_WEIGHT)
    signs.add_((CE_WEIGHT * known + distill * mass).unsqueeze(-1))
    grad = draft_probs.mul_(signs)
    grad[rows, places] -= CE_WEIGHT * known
    if distill:
        grad.sub_(distill * target_probs)
    return cross_entropy, distance, grad.mul_(weights.unsqueeze(-1))


def position_weights(block_size: int) -> Tensor:
    """exp(−(k − 1)/4) for k = 1..B."""
    return torch.exp(-torch.arange(block_size) / DECAY)


def dspark_loss(
    logits: Tensor,
    confidence: Tensor,
    target_probs: Tensor,
    labels: Tensor,
    valid: Tensor,
    distill: float = 0.0,
) -> LossParts:
    """The loss of one step.

    logits: [A, B, V_draft]; confidence: [A, B] logits; target_probs: [A, B, V_draft], the target's
    distribution restricted to the draft vocabulary, not renormalised; labels: [A, B] draft ids of
    the true tokens, −1 where the draft vocabulary lacks them; valid: [A, B], False past a text's
    end. distill weighs an extra cross entropy of q against p, which the paper does not have: its
    gradient q − p teaches more per row while q and p hardly overlap. The figures leave it out.
    """
    weights = position_weights(logits.shape[1]).expand_as(valid) * valid
    scale = weights.sum().clamp(min=1e-9)
    total, cross_entropy, distance = _Distribution.apply(
        logits.flatten(0, 1),
        target_probs.flatten(0, 1),
        labels.flatten(),
        weights.flatten(),
        distill,
    )
    distance = distance.view_as(valid)
    agreement = (1 - distance / 2).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence, agreement, reduction="none")
    conf = (bce * weights).sum() / scale
    return LossParts(
        loss=total / scale + CONFIDENCE_WEIGHT * conf,
        cross_entropy=(cross_entropy.view_as(valid) * weights).sum() / scale,
        mean_distance=(distance * weights).sum() / scale,
        confidence=conf.detach(),
        distance=distance,
    )


def survival(distance: Tensor, valid: Tensor) -> Tensor:
    """Chance that drafts 1..k are all accepted at temperature 1: ∏(1 − ½‖q − p‖₁). [A, B]."""
    return ((1 - distance / 2).clamp(0, 1) * valid).cumprod(-1)


def accepted_greedy(logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """Drafts accepted per block at temperature 0, [A]: leading rows whose arg-max is right."""
    return ((logits.argmax(-1) == labels) & valid).long().cumprod(-1).sum(-1)
