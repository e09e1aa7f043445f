"""numerics="batch_invariant": a row's bits do not depend on what runs beside it, in any dtype."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import StartupError
from common.models.dense import DenseTarget
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.nn.block import RMSNorm
from common.nn.linear import Linear
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.numeric import first_mismatch
from common.testing.tiny import Family, tiny_target

torch.set_num_threads(1)
TAPS = (-1, 0)
NUM_TOKENS = 24
TABLE, OTHER_TABLES = [6, 1, 4, 2, 8, 3], [[0, 5, 7, 9, 10, 11], [12, 13, 14, 15, 16, 17]]


def run(
    model: DenseTarget, tokens: torch.Tensor, cuts: list[int], company: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Feeds `tokens` cut at `cuts`, each time beside requests of `company` many rows.

    Returns logits, taps and KV rows of the request itself.
    """
    kv = model.new_kv(18, 4)
    logits, taps = [], []
    for i, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(tokens)], strict=True)):
        parts = [(TABLE, start, stop)]
        for table, count in zip(OTHER_TABLES, company, strict=False):
            parts.insert(i % 2, (table, 0, count))
        segments, slots, positions, ids, row, own = [], [], [], [], 0, 0
        for table, first, last in parts:
            own = row if table is TABLE else own
            segments.append(Segment(row, last - first, last, table))
            slots += kv.slots_of(table, first, last)
            positions += range(first, last)
            ids.append(tokens[first:last])
            row += last - first
        batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
        hidden, tapped = model.forward(torch.cat(ids), kv, batch, TAPS)
        assert tapped is not None
        mine = slice(own, own + stop - start)
        # All rows' logits in one call for some cuts, only our own for others.
        logits.append(model.logits(hidden)[mine] if i % 2 else model.logits(hidden[mine]))
        taps.append(tapped[mine])
    rows = torch.stack([rows[kv.slots_of(TABLE, 0, len(tokens))] for rows in kv.rows])
    return torch.cat(logits), torch.cat(taps), rows


@pytest.fixture(scope="module", params=["llama-16", "qwen3-32", "llama-48"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = "llama" if request.param.startswith("llama") else "qwen3"
    hidden = int(request.param[-2:])
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_target(folder, family, hidden=hidden, heads=4, kv_heads=2, vocab=45)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_do_not_depend_on_their_company(checkpoint: Path, dtype: torch.dtype) -> None:
    model, _ = load_target(checkpoint, dtype, numerics="batch_invariant")
    tokens = torch.randint(45, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    alone = run(model, tokens, list(range(1, NUM_TOKENS)), [])  # plain decoding, one row at a time

    @settings(max_examples=25, deadline=None)
    @given(
        cuts=st.sets(st.integers(1, NUM_TOKENS - 1)).map(sorted),
        company=st.lists(st.integers(1, 11), max_size=2),
    )
    def check(cuts: list[int], company: list[int]) -> None:
        found = run(model, tokens, cuts, company)
        for name, got, expected in zip(("logits", "taps", "kv"), found, alone, strict=True):
            mismatch = first_mismatch(got, expected)
            assert not mismatch, f"{name} with {cuts=} {company=}: {mismatch}"

    check()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v4"])
def test_a_kernel_that_minds_a_rows_place_is_found_at_load(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tiny_deepseek_v4 if family == "deepseek_v4" else tiny_target
    checkpoint, honest = make(tmp_path), Linear.__call__
    load_target(checkpoint, torch.float32, numerics="batch_invariant")

    def odd(self: Linear, x: torch.Tensor) -> torch.Tensor:
        y = honest(self, x)
        y[5] *= 1 + 1e-6
        return y

    monkeypatch.setattr(Linear, "__call__", odd)
    with pytest.raises(StartupError, match="rounds a row by its place among 8 rows"):
        load_target(checkpoint, torch.float32, numerics="batch_invariant")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 576])
def test_a_norm_rounds_a_row_alike_whatever_runs_beside_it(dtype: torch.dtype, size: int) -> None:
    rows = torch.randn(40, size).to(dtype)
    norm = RMSNorm(torch.randn(size).to(dtype), 1e-5)
    alone = torch.cat([norm(row) for row in rows.split(1)])
    assert torch.equal(norm(rows), alone)
    strided = rows.view(8, 5, size)[:, 1:3]
    assert torch.equal(norm(strided), alone.view(8, 5, size)[:, 1:3])
    exact = F.rms_norm(rows.double(), (size,), norm.weight.double(), 1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    assert ((alone - exact).abs() <= tolerance * exact.abs() + 1e-6).all()
