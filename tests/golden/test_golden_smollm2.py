"""The embedded default target's real weights: against transformers, and bit for bit in bf16."""

from pathlib import Path

import pytest
import torch

from common.config import cache_dir
from common.errors import LoadError
from common.loading.gguf_convert import default_target
from common.loading.tokenizer import Tokenizer
from common.models.dense import DenseTarget
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.testing.numeric import first_mismatch, max_difference

torch.set_num_threads(1)
PROMPT = (
    "<|im_start|>user\nName three rivers in Europe and say which one is the longest.<|im_end|>\n"
    "<|im_start|>assistant\nThe Volga, the Danube and the Rhine. The Volga is the longest: 3530 km."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return default_target(cache_dir())
    except LoadError as error:
        pytest.skip(error.message)


def one_batch(
    model: DenseTarget, parts: list[tuple[list[int], int, list[int]]]
) -> tuple[torch.Tensor, AttentionBatch]:
    """parts: (token ids, start, block table) per request, side by side."""
    kv = model.new_kv(1, 16)
    segments, slots, positions, ids = [], [], [], []
    for token_ids, start, table in parts:
        stop = start + len(token_ids)
        segments.append(Segment(len(ids), len(token_ids), stop, table))
        slots += kv.slots_of(table, start, stop)
        positions += range(start, stop)
        ids += token_ids
    batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
    return torch.tensor(ids), batch


def test_logits_equal_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    token_ids = Tokenizer(folder).encode(PROMPT)
    # In float64: two float32 forwards that sum in different orders are 1e-4 apart already.
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        out = theirs(torch.tensor([token_ids]), output_hidden_states=True)
    model, report = load_target(folder, torch.float32)
    assert report.num_tensors == 272 and not report.ignored
    ids, batch = one_batch(model, [(token_ids, 0, [2, 3, 0, 1])])
    hidden, taps = model.forward(ids, model.new_kv(4, 16), batch, (1, 14, 28))
    assert taps is not None
    expected = torch.cat([out.hidden_states[i + 1][0] for i in (1, 14, 28)], dim=1)
    # The residual stream reaches 25,000 in a few dimensions: taps compare relative to that.
    assert max_difference(taps, expected) < 1e-5 * expected.abs().max()
    assert max_difference(model.logits(hidden), out.logits[0]) < 1e-4
    assert torch.equal(model.logits(hidden).argmax(1), out.logits[0].argmax(1))


def test_invariant_numerics_in_bf16(folder: Path) -> None:
    """A row's logits, taps and KV are the same bits alone, in blocks, in chunks, beside others."""
    token_ids = Tokenizer(folder).encode(PROMPT)
    model, _ = load_target(folder, torch.bfloat16, numerics="batch_invariant")
    n, table, other = len(token_ids), [5, 6, 7, 0], [1, 2, 3, 4]
    taps = (0, 15, 28)

    def rows(steps: list[list[tuple[list[int], int, list[int]]]]) -> tuple[torch.Tensor, ...]:
        """Logits, taps and KV rows of the request in `table` after running `steps`."""
        kv = model.new_kv(8, 16)
        logits, tapped = [], []
        for parts in steps:
            ids, batch = one_batch(model, parts)
            hidden, t = model.forward(ids, kv, batch, taps)
            assert t is not None
            own = [
                i
                for s in batch.segments
                if s.block_table == table
                for i in range(s.query_start, s.query_start + s.num_query)
            ]
            logits.append(model.logits(hidden[own]))
            tapped.append(t[own])
        slots = kv.slots_of(table, 0, n)
        return torch.cat(logits), torch.cat(tapped), torch.stack([r[slots] for r in kv.rows])

    def part(start: int, stop: int, own: bool = True) -> tuple[list[int], int, list[int]]:
        return (token_ids[start:stop], start, table if own else other)

    whole = rows([[part(0, n)]])
    tail = [part(0, n - 13)], [part(n - 13, n - 7)]
    for steps in (
        [*tail, *([part(i, i + 1)] for i in range(n - 7, n))],
        [
            *tail,
            [part(n - 7, n - 1), part(0, 20, own=False)],
            [part(20, 22, own=False), part(n - 1, n)],
        ],
        [[part(0, 9)], [part(0, 11, own=False), part(9, 17)], [part(17, n)]],
    ):
        for name, found, expected in zip(
            ("logits", "taps", "kv"), rows(list(steps)), whole, strict=True
        ):
            assert not first_mismatch(found, expected), (name, first_mismatch(found, expected))
