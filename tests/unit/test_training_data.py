"""What a training step looks at: the sampled columns, the temperature, and weights taken over."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.testing.tiny import tiny_target
from drafter_svc.training.data import Packer, choose_columns
from drafter_svc.training.export import export
from drafter_svc.training.model import Drafter
from drafter_svc.training.settings import Settings
from drafter_svc.training.shards import Text
from drafter_svc.training.start import HEAD, adopt, drafter_config, new_drafter, target_tensors


def test_columns_hold_all_labels_and_likely_tokens_and_stand_for_the_rest() -> None:
    torch.manual_seed(0)
    probs = torch.full((6, 400), 1e-4)
    probs[2, 17] = 0.4
    labels = torch.tensor([[5, 300], [-1, 5]])
    columns = choose_columns(probs, labels, 300, torch.Generator().manual_seed(1))
    assert {5, 17, 300} <= set(columns.ids.tolist())
    assert len(columns.ids) == columns.ids.unique().numel() == 300
    assert columns.shares.sum().item() == pytest.approx(400)
    places = columns.find(labels, 400)
    assert places[1, 0] == -1
    assert columns.ids[places[labels >= 0]].tolist() == [5, 300, 5]


def test_sampled_sums_are_right_on_average() -> None:
    probs = torch.rand(3, 2000, generator=torch.Generator().manual_seed(3)) * 1e-3
    labels, rng = torch.tensor([[1]]), torch.Generator().manual_seed(2)
    sums = []
    for _ in range(200):
        columns = choose_columns(probs, labels, 300, rng)
        sums.append((probs[:, columns.ids] * columns.shares).sum(-1))
    torch.testing.assert_close(torch.stack(sums).mean(0), probs.sum(-1), rtol=0.01, atol=0)


def tiny_text(head: Tensor, length: int = 12) -> Text:
    states = torch.randn(length, 2 * head.shape[1]).bfloat16()
    lse = (states[:, -head.shape[1] :].float() @ head.float().T).logsumexp(-1)
    return Text(torch.randint(0, len(head), (length,)), states, lse, 4, 0, greedy=True)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_target_probs_are_the_targets_at_that_temperature(temperature: float) -> None:
    torch.manual_seed(4)
    head = (torch.randn(40, 32) / 4).bfloat16()
    text = tiny_text(head)
    packer = Packer(head, torch.arange(40), 3, [0], [0], temperature)
    examples = packer.pack([text], [torch.tensor([4, 6])])
    logits = text.states[[[4, 5, 6], [6, 7, 8]], 32:].float() @ head.float().T
    wanted = (logits / temperature).softmax(-1)
    torch.testing.assert_close(examples.target_probs.float(), wanted, atol=0.01, rtol=0.05)
    few = Packer(head, torch.arange(0, 40, 2), 3, [0], [0], temperature)
    restricted = few.pack([text], [torch.tensor([4, 6])]).target_probs.float()
    # Missing tokens count as one, so what remains can only be less than the true share.
    assert (restricted <= wanted[..., ::2] * 1.06 + 0.01).all()


def make(folder: Path, d2t: Tensor, rank: int) -> Drafter:
    settings = Settings(
        target=folder,
        drafter_taps=[0, 2],
        num_kv_heads=2,
        intermediate_size=24,
        draft_vocab_size=len(d2t),
        block_size=2,
        markov_rank=rank,
        mask_token_id=3,
    )
    config = drafter_config(settings)
    sample = torch.randn(50, 2 * config.hidden_size)
    return new_drafter(config, target_tensors(folder), d2t, sample, seed=0)


def test_a_larger_drafter_starts_as_the_one_it_adopts(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", layers=4, vocab=64)
    old = make(folder, torch.arange(0, 64, 4), rank=4)
    with torch.no_grad():
        for weight in old.parameters():
            weight.copy_((weight + 0.1 * torch.randn(weight.shape)).bfloat16())
    new = make(folder, torch.arange(0, 64, 2), rank=6)
    adopt(new, export(old, tmp_path / "old"))
    head = target_tensors(folder)[HEAD]
    text = tiny_text(head)
    anchors = [torch.tensor([5, 7])]
    results = []
    for drafter in (old, new):
        packer = Packer(head, drafter.d2t, 2, [0, 2], [0, 2])
        text.states = torch.cat([text.states] * 2, dim=1)[:, : 3 * head.shape[1]]
        results.append(drafter(packer.pack([text], anchors).blocks))
    (old_logits, old_confidence), (new_logits, new_confidence) = results
    torch.testing.assert_close(new_logits[..., ::2], old_logits)
    torch.testing.assert_close(new_confidence, old_confidence)
