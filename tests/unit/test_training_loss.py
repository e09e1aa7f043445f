"""The training loss equals a straight-line reference, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from drafter_svc.training.loss import (
    accepted_greedy,
    dspark_loss,
    position_weights,
    survival,
)


def reference(logits, confidence, target_probs, labels, valid, distill=0.0):
    """The formula, row by row, left to autograd."""
    total = conf = weight_sum = torch.zeros(())
    for a in range(logits.shape[0]):
        for k in range(logits.shape[1]):
            if not valid[a, k]:
                continue
            weight = torch.exp(torch.tensor(-k / 4.0))
            draft_probs = logits[a, k].softmax(-1)
            distance = (draft_probs - target_probs[a, k]).abs().sum() + 1 - target_probs[a, k].sum()
            label = int(labels[a, k])
            ce = F.cross_entropy(logits[a, k], labels[a, k]) if label >= 0 else 0.0
            agreement = (1 - distance / 2).detach()
            bce = F.binary_cross_entropy_with_logits(confidence[a, k], agreement)
            soft = -(target_probs[a, k] * logits[a, k].log_softmax(-1)).sum()
            total = total + weight * (0.1 * ce + 0.9 * distance + distill * soft)
            conf = conf + weight * bce
            weight_sum = weight_sum + weight
    return (total + conf) / weight_sum


def example(num_blocks=5, block_size=4, size=300):
    torch.manual_seed(3)
    logits = torch.randn(num_blocks, block_size, size) * 3
    confidence = torch.randn(num_blocks, block_size)
    # An eighth of the target's mass lies outside the draft vocabulary.
    target_probs = (torch.randn(num_blocks, block_size, size) * 3).softmax(-1) * 0.875
    labels = torch.randint(0, size, (num_blocks, block_size))
    labels[1, 2] = -1
    valid = torch.ones(num_blocks, block_size, dtype=torch.bool)
    valid[2, 1:] = False
    return logits, confidence, target_probs, labels, valid


@pytest.mark.parametrize("distill", [0.0, 0.7])
def test_loss_and_gradient_equal_the_reference(distill: float) -> None:
    logits, confidence, target_probs, labels, valid = example(num_blocks=40)
    gradients, values = [], []
    for function in (reference, lambda *inputs: dspark_loss(*inputs).loss):
        inputs = [logits.clone().requires_grad_(), confidence.clone().requires_grad_()]
        loss = function(*inputs, target_probs, labels, valid, distill)
        gradients.append(torch.autograd.grad(loss, inputs))
        values.append(loss.item())
    if not distill:  # the extra term has a gradient but is no part of the reported loss
        assert abs(values[0] - values[1]) < 1e-5
    for expected, got in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_invalid_rows_have_no_gradient() -> None:
    logits, confidence, target_probs, labels, valid = example()
    logits.requires_grad_()
    dspark_loss(logits, confidence, target_probs, labels, valid).loss.backward()
    assert logits.grad is not None
    assert logits.grad[2, 1:].abs().max() == 0
    assert logits.grad[2, 0].abs().max() > 0


def test_position_weights_decay_by_four_not_by_block_size() -> None:
    torch.testing.assert_close(position_weights(7)[4], torch.tensor(-1.0).exp())


def test_survival_of_identical_distributions_is_one_and_stops_at_the_text_end() -> None:
    valid = torch.tensor([[True, True, False]])
    assert survival(torch.zeros(1, 3), valid).tolist() == [[1.0, 1.0, 0.0]]
    assert survival(torch.tensor([[1.0, 0.0, 0.0]]), valid).tolist() == [[0.5, 0.5, 0.0]]


def test_greedy_acceptance_counts_the_leading_run_only() -> None:
    logits = F.one_hot(torch.tensor([[1, 2, 3], [0, 2, 3], [1, 2, 3]]), 5).float()
    labels = torch.tensor([[1, 2, 4], [1, 2, 3], [1, 2, 3]])
    valid = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    assert accepted_greedy(logits, labels, valid).tolist() == [2, 0, 1]
