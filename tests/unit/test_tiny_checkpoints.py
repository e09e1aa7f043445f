"""Tiny checkpoints do what tests rely on: good drafters are mostly right, bad ones mostly wrong."""

from pathlib import Path

import pytest
import torch

from common.loading.tokenizer import Tokenizer
from common.models.dspark_qwen3 import DSparkQwen3, load_drafter
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.testing.tiny import Family, Head, tiny_drafter, tiny_target

torch.set_num_threads(1)
TABLE = list(range(12))
MAX_LEN = 90


def greedy_block(
    drafter: DSparkQwen3, anchor: int, hidden: torch.Tensor, base: torch.Tensor
) -> list[int]:
    """Arg-max drafts of one request's block, each with the bias of the token before it."""
    previous, state, drafts = torch.tensor([anchor]), drafter.start_state(1), []
    for k in range(hidden.shape[1]):
        bias, state = drafter.bias(previous, hidden[:, k], state)
        assert bias is not None
        previous = drafter.to_target_ids((base[:, k] + bias).argmax(1))
        drafts.append(int(previous))
    return drafts


def mean_accepted(target_path: Path, drafter_path: Path) -> float:
    """Accepted drafts per round of a greedy generation."""
    target, _ = load_target(target_path, torch.float32)
    drafter, _ = load_drafter(drafter_path, target_path, torch.float32)
    kv, context = target.new_kv(12, 8), drafter.new_kv(12, 8)
    row, start, accepted = [3, 1, 4, 1, 5], 0, []
    while True:
        stop = start + len(row)
        slots = torch.tensor(kv.slots_of(TABLE, start, stop))
        batch = AttentionBatch(
            [Segment(0, len(row), stop, TABLE)], slots, torch.arange(start, stop)
        )
        hidden, taps = target.forward(torch.tensor(row), kv, batch, drafter.config.target_layer_ids)
        assert taps is not None
        choices = target.logits(hidden).argmax(1).tolist()
        right = len(row) - 1  # the prompt, on the first turn
        if start:
            right = next((i for i, d in enumerate(row[1:]) if d != choices[i]), right)
            accepted.append(right)
        kept = slice(0, right + 1)
        drafter.ingest(drafter.project(taps[kept]), context, slots[kept], batch.positions[kept])
        start, anchor = start + right + 1, choices[right]
        if start > MAX_LEN - drafter.config.block_size:
            return sum(accepted) / len(accepted)
        hidden, base = drafter.block(
            torch.tensor([anchor]), torch.tensor([start]), 4, context, [TABLE]
        )
        row = [anchor, *greedy_block(drafter, anchor, hidden, base)]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_good_drafters_are_often_accepted(family: Family, head: Head, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", family)
    good = mean_accepted(target, tiny_drafter(tmp_path / "good", target, head))
    bad = mean_accepted(target, tiny_drafter(tmp_path / "bad", target, head, good=False))
    assert 1.0 < good < 4.0, "often, and sometimes not"
    assert bad < 0.4


def test_a_reduced_vocabulary_still_drafts(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", vocab=32)
    drafter = tiny_drafter(tmp_path / "drafter", target, draft_vocab=24)
    assert mean_accepted(target, drafter) > 0.7


@pytest.mark.parametrize("vocab", [12, 64, 257, 512])
def test_every_id_of_the_tokenizer_has_text(vocab: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_target(tmp_path, vocab=vocab))
    assert tokenizer.vocab_size == vocab
    pieces = [tokenizer.decode([i]) for i in range(vocab)]
    assert all(pieces[:-2]) and pieces[-2:] == ["", ""]
    assert tokenizer.token_id("<eos>") == vocab - 1
    text = "abc" * 5
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    folders = [tiny_target(tmp_path / name, "qwen3", seed=5) for name in "ab"]
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        first, second = ((folder / file).read_bytes() for folder in folders)
        assert first == second
    other = tiny_target(tmp_path / "c", "qwen3", seed=6)
    assert (other / "model.safetensors").read_bytes() != (
        folders[0] / "model.safetensors"
    ).read_bytes()
