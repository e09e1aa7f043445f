"""Paged, ragged, grouped-query attention against a dense loop; the KV cache's addressing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.nn.attention import AttentionBatch, Segment, attend
from common.nn.linear import Linear
from common.nn.paged_kv import PagedKV
from common.testing.numeric import max_difference

torch.set_num_threads(1)
KV_BLOCK = 4


def dense(
    q: torch.Tensor, kv: PagedKV, batch: AttentionBatch, scale: float, layer: int
) -> torch.Tensor:
    """Row by row, head by head."""
    out = torch.zeros_like(q)
    shared = q.shape[1] // kv.num_kv_heads
    for s in batch.segments:
        for i in range(s.num_query):
            seen = s.context_len - (s.num_query - 1 - i if batch.causal else 0)
            slots = kv.slots_of(s.block_table, 0, seen)
            for h in range(q.shape[1]):
                k, v = (x[layer][slots, h // shared].double() for x in (kv.k, kv.v))
                row = q[s.query_start + i, h].double()
                out[s.query_start + i, h] = (k @ row * scale).softmax(0) @ v
    return out


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 9) | st.just(20), st.integers(0, 20) | st.just(90)),
        min_size=1,
        max_size=4,
    ),
    shared=st.sampled_from([1, 3]),
    causal=st.booleans(),
    scattered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_attention_equals_a_dense_loop(
    shapes: list[tuple[int, int]],
    shared: int,
    causal: bool,
    scattered: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = PagedKV(2, 120, KV_BLOCK, 2, 8, dtype)
    kv.rows[1].normal_(generator=generator)
    blocks = torch.randperm(120, generator=generator) if scattered else torch.arange(120)
    segments, row, block = [], 0, 0
    for num_query, before in shapes:
        num_blocks = -(-(num_query + before) // KV_BLOCK)
        table = blocks[block : block + num_blocks].tolist()
        segments.append(Segment(row, num_query, num_query + before, table))
        row, block = row + num_query, block + num_blocks
    places = torch.arange(row)
    batch = AttentionBatch(segments, places, places, causal)
    q = torch.randn(row, 2 * shared, 8, generator=generator).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    assert max_difference(attend(q, kv, 1, batch, 0.3), dense(q, kv, batch, 0.3, 1)) < tolerance


def test_a_ragged_group_around_a_foreign_request_is_no_slice() -> None:
    """Rows 3 and 1 run together; a short request's 2 rows lie between: 3 + 2 + 1 is 2 * 3 too."""
    kv = PagedKV(1, 120, KV_BLOCK, 2, 8, torch.float32)
    kv.rows[0].normal_()
    segments = [
        Segment(0, 3, 201, list(range(51))),
        Segment(3, 2, 2, [60]),
        Segment(5, 1, 200, list(range(61, 111))),
    ]
    batch = AttentionBatch(segments, torch.arange(6), torch.arange(6))
    q = torch.randn(6, 4, 8)
    assert max_difference(attend(q, kv, 0, batch, 0.3), dense(q, kv, batch, 0.3, 0)) < 1e-5


def test_keys_past_the_context_are_not_read() -> None:
    kv = PagedKV(1, 4, KV_BLOCK, 1, 8, torch.float32)
    kv.rows[0].normal_()
    batch = AttentionBatch([Segment(0, 1, 6, [2, 1])], torch.tensor([5]), torch.tensor([5]))
    q = torch.randn(1, 2, 8)
    before = attend(q, kv, 0, batch, 1.0)
    unread = [s for s in range(16) if s not in kv.slots_of([2, 1], 0, 6)]
    kv.rows[0][unread] = torch.nan
    assert torch.equal(attend(q, kv, 0, batch, 1.0), before)


@pytest.mark.parametrize("lengths", [[201], [201, 130], [30, 7]])
def test_padding_reads_nothing_that_others_left(lengths: list[int]) -> None:
    kv = PagedKV(1, 120, KV_BLOCK, 1, 8, torch.bfloat16)
    segments, held, row, block = [], list[int](), 0, 0
    for length in lengths:
        table = list(range(block, block + -(-length // KV_BLOCK)))
        segments.append(Segment(row, 5, length, table))
        held += kv.slots_of(table, 0, length)
        row, block = row + 5, table[-1] + 1
    kv.rows[0].fill_(torch.nan)
    kv.rows[0][held] = torch.randn(len(held), 2, 8).bfloat16()
    batch = AttentionBatch(segments, torch.arange(row), torch.arange(row))
    assert attend(torch.randn(row, 3, 8).bfloat16(), kv, 0, batch, 1.0).isfinite().all()


def test_contexts_that_grow_meet_the_same_shapes_again() -> None:
    """Else oneDNN would compile two kernels for every round of a lone request."""
    kv = PagedKV(1, 120, KV_BLOCK, 1, 8, torch.bfloat16)
    shapes = set()
    for length in range(300, 320):
        segment = Segment(0, 5, length, list(range(100)))
        batch = AttentionBatch([segment], torch.arange(5), torch.arange(5))
        (group,) = batch.groups(kv, 3)
        assert not group.fused
        shapes.add(group.num_keys)
    assert shapes == {320}


def test_kv_write_reaches_exactly_its_slots() -> None:
    kv = PagedKV(2, 3, KV_BLOCK, 2, 4, torch.float32)
    assert kv.slots_of([2, 0], 2, 6) == [10, 11, 0, 1]
    k, v = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    kv.write(1, torch.tensor([10, 11, 0, 1]), k, v)  # the fifth row is padding
    assert torch.equal(kv.k[1][[10, 11, 0, 1]], k[:4])
    assert torch.equal(kv.v[1][[10, 11, 0, 1]], v[:4])
    assert int((kv.rows[1] != 0).any(-1).any(-1).sum()) == 4 and not kv.rows[0].any()
    assert kv.num_bytes == 2 * 12 * 4 * 4 * 4


def test_a_block_table_that_is_too_short_is_our_own_mistake() -> None:
    kv = PagedKV(1, 4, KV_BLOCK, 1, 8, torch.float32)
    batch = AttentionBatch([Segment(0, 1, 9, [0, 1])], torch.tensor([8]), torch.tensor([8]))
    with pytest.raises(AssertionError, match="2 blocks cannot hold"):
        attend(torch.zeros(1, 1, 8), kv, 0, batch, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [24, 1200], ids=["plain", "packed"])
def test_linear(dtype: torch.dtype, rows: int, has_bias: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, 64, generator=generator).to(dtype) / 8
    bias = torch.randn(width, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = Linear(weight, bias)(x)
    assert found.dtype == dtype
    assert max_difference(found, exact) < (1e-5 if dtype == torch.float32 else 0.03)
