"""DeepSeek-V4 split over ranks: the numbers of one process, from fewer bytes per rank."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import LoadError, StartupError
from common.loading.safetensors_files import LoadReport, read_json
from common.models import drafters
from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.shards import Shards
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.models.drafters import load_drafter
from common.models.interfaces import DraftModel, Numerics, Target
from common.models.ranks import follow_drafter, follow_target
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.parallel import Parallel
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.ranks import run_ranks
from common.testing.tiny import tiny_drafter, tiny_target

KV_BLOCK, TAPS, BLOCK = 16, (2, 3, 4), 5


def blocks_of(size: int) -> dict[str, Any]:
    """Config keys for scale blocks so small that tiny matrices have several."""
    quantisation = {"quant_method": "fp8", "weight_block_size": [size, size]}
    return {"quantization_config": quantisation, "compress_rate_hca": KV_BLOCK}


# Split over 4 ranks, a rank's 24 rows of wo_a begin or end inside a block of 16, its shared expert
# has 2 of 6 blocks (the last rank: none), and 10 experts are 2, 3, 2 and 3.
PRO = {**blocks_of(16), "n_routed_experts": 10, "o_lora_rank": 24}


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its shared expert is one block: with 2 ranks, the second has none of it."""
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=KV_BLOCK)


@pytest.fixture(scope="module")
def pro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), "pro", **PRO)


def led(
    folder: Path,
    num_ranks: int,
    use: Callable[[Target], Any],
    numerics: Numerics = "fast",
) -> Any:
    """`use` of the target that rank 0 sees."""

    def work(parallel: Parallel) -> Any:
        model, _ = load_target(folder, torch.float32, "cpu", numerics, parallel)
        if parallel.rank:
            return follow_target(model, parallel)
        result = use(model)
        parallel.stop()
        return result

    return run_ranks(num_ranks, work)[0]


def in_chunks(model: Target) -> list[Tensor]:
    """Logits and taps of two requests, in chunks that cross windows and groups, with a rollback."""
    ids = [torch.arange(60) * 7 % 90, torch.arange(45) * 11 % 90]
    tables = [[3, 6, 1, 9], [2, 0, 5, 7]]
    kv = model.new_kv(10, KV_BLOCK, 8)
    results = []
    for spans in ([(0, 40), (0, 3)], [(40, 41), (3, 30)], [(41, 46)], [(43, 60), (30, 45)]):
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for i, (start, stop) in enumerate(spans):
            segments.append(Segment(len(positions), stop - start, stop, tables[i]))
            tokens += ids[i][start:stop].tolist()
            positions += range(start, stop)
        kv.prepare(segments)
        slots = [
            slot
            for s in segments
            for slot in kv.slots_of(s.block_table, s.context_len - s.num_query, s.context_len)
        ]
        batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
        hidden, taps = model.forward(torch.tensor(tokens), kv, batch, TAPS)
        assert taps is not None
        results += [model.logits(hidden), taps]
        kv.settle(segments)
    # The first request leaves; another one needs the room of its rows, though not its blocks.
    kv.release(tables[0])
    segments = [Segment(0, 45, 45, [8, 4, 3])]
    kv.prepare(segments)
    slots = kv.slots_of([8, 4, 3], 0, 45)
    batch = AttentionBatch(segments, torch.tensor(slots), torch.arange(45))
    return [*results, model.logits(model.forward(ids[1], kv, batch)[0])]


@pytest.mark.parametrize(("kind", "num_ranks"), [("flash", 2), ("pro", 2), ("pro", 4)])
def test_logits_and_taps_are_those_of_one_process(
    kind: str, num_ranks: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    alone = in_chunks(load_target(folder, torch.float32)[0])
    for got, want in zip(led(folder, num_ranks, in_chunks), alone, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_neighbours_do_not_change_a_row_in_batch_invariant_mode(pro: Path, num_ranks: int) -> None:
    """Not by the order in which the ranks' parts are added, which in a ring depends on where an
    element lies, nor by the scores of 10 experts, of which softplus rounds the last few of a slice
    in another way. In fp32, since rounding to bf16 would hide most of it.
    """
    lengths = (3, 9, 2)
    prompts = [torch.arange(n) * 7 % 90 for n in lengths]

    def run(model: Target, chosen: Sequence[int]) -> Tensor:
        kv, segments, first = model.new_kv(4, KV_BLOCK), [], 0
        for i in chosen:
            segments.append(Segment(first, lengths[i], lengths[i], [i]))
            first += lengths[i]
        positions = torch.cat([torch.arange(lengths[i]) for i in chosen])
        # V4 finds its slots by positions and tables.
        batch = AttentionBatch(segments, torch.zeros_like(positions), positions)
        return model.logits(model.forward(torch.cat([prompts[i] for i in chosen]), kv, batch)[0])

    def rows(model: Target) -> tuple[Tensor, list[Tensor]]:
        return run(model, (0, 1, 2)), [run(model, (i,)) for i in range(3)]

    together, apart = led(pro, num_ranks, rows, "batch_invariant")
    assert torch.equal(together, torch.cat(apart))


def drafts(model: DraftModel) -> list[Tensor]:
    """Two sessions' blocks, the second after more rows, with biases and confidences."""
    generator = torch.Generator().manual_seed(3)
    kv, tables = model.new_kv(8, KV_BLOCK), [[4, 1], [0, 3]]
    results = []
    for start, stop in ((0, 19), (19, 22)):
        rows = model.project(torch.randn(2 * (stop - start), 3 * 64, generator=generator))
        slots = [slot for table in tables for slot in kv.slots_of(table, start, stop)]
        positions = torch.arange(start, stop).repeat(2)
        model.ingest(rows, kv, torch.tensor(slots), positions)
        anchors = torch.tensor([5, 17])
        hidden, logits = model.block(anchors, torch.tensor([stop, stop]), 4, kv, tables)
        bias, _ = model.bias(anchors, hidden[:, 0], model.start_state(2))
        confidence = model.confidence(hidden[:, 0], anchors)
        assert bias is not None and confidence is not None
        results += [hidden, logits, bias, confidence]
    return results


@pytest.mark.parametrize(("kind", "num_ranks"), [("flash", 2), ("pro", 4)])
def test_drafts_are_those_of_one_process(
    kind: str, num_ranks: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)

    def work(parallel: Parallel) -> list[Tensor]:
        model, report = load_drafter(folder, folder, torch.float32, "cpu", parallel)
        assert len(report.peak_bytes_of_ranks) == num_ranks
        if parallel.rank:
            follow_drafter(model, parallel)
            return []
        result = drafts(model)
        parallel.stop()
        return result

    alone = drafts(load_drafter(folder, folder, torch.float32, "cpu")[0])
    for got, want in zip(run_ranks(num_ranks, work)[0], alone, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


SPLIT = re.compile(r".*\.(ffn\.(shared_)?experts\..*|attn\.(wq_b|wo_a|wo_b)\..*|attn\.attn_sink)")


def stored_bytes(folder: Path) -> dict[str, int]:
    """Tensor name -> size in the files."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118
                tensor = held.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


def test_a_rank_reads_its_slices_only(tmp_path: Path) -> None:
    """In blocks of 8 every slice starts on a border, so that no scale is read twice."""
    folder = tiny_deepseek_v4(tmp_path, "pro", **blocks_of(8), n_routed_experts=10)
    sizes = stored_bytes(folder)
    target = {k: v for k, v in sizes.items() if not k.startswith("mtp.")}
    drafter = {k: v for k, v in sizes.items() if k not in target}
    drafter |= {k: sizes[k] for k in ("embed.weight", "head.weight")}
    of_rank_0 = ("head.", "mtp.0.main_", "mtp.2.markov_head.", "mtp.2.confidence_head.")

    def work(parallel: Parallel) -> list[LoadReport]:
        _, target_report = load_target(folder, torch.float32, "cpu", "fast", parallel)
        _, drafter_report = load_drafter(folder, folder, torch.float32, "cpu", parallel)
        return [target_report, drafter_report]

    of_both = zip(*run_ranks(4, work), strict=True)
    for held, reports in zip((target, drafter), of_both, strict=True):
        split = sum(size for name, size in held.items() if SPLIT.fullmatch(name))
        first = sum(size for name, size in held.items() if name.startswith(of_rank_0))
        common = sum(held.values()) - split - first
        assert sum(r.num_bytes for r in reports) == split + first + 4 * common
        assert max(r.num_bytes for r in reports) < 0.6 * sum(held.values())
        assert [r.rank for r in reports] == [0, 1, 2, 3]
        for report in reports:
            assert report.num_tensors + report.num_elsewhere + len(report.ignored) == len(
                held if held is target else sizes
            )
            assert report.peak_bytes_of_ranks == tuple(r.peak_bytes for r in reports)
            assert "peak_bytes_of_ranks" in json.loads(report.to_json())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slices_put_together_are_the_whole(pro: Path, num_ranks: int) -> None:
    """Whatever format a slice has and wherever it starts in a block."""
    config = deepseek_v4_config(pro, read_json(pro / "config.json"))
    weights = DeepseekV4Weights(pro, config, "target", torch.float32)
    shards = [Shards(config, Parallel(rank, num_ranks)) for rank in range(num_ranks)]
    heads = config.num_heads * config.head_dim
    layer, low, inner = "model.layers.1.", config.o_groups * config.o_lora_rank, 96
    cases: list[tuple[str, int | None, tuple[int, int], Callable[[Shards], range], int]] = [
        ("attn.wq_b", None, (heads, config.q_lora_rank), lambda own: own.head_rows, 0),
        ("attn.wo_a", None, (low, heads // config.o_groups), lambda own: own.group_rows, 0),
        ("attn.wo_b", None, (64, low), lambda own: own.group_rows, 1),
        ("ffn.shared_experts.gate_up_proj", 1, (inner, 64), lambda own: own.shared_channels, 0),
        ("ffn.shared_experts.down_proj", None, (64, inner), lambda own: own.shared_channels, 1),
    ]
    for name, shard, shape, of, axis in cases:
        whole = weights.matrix(layer + name, shape, shard)
        only = ("only_rows", "only_cols")[axis]
        slices = [
            weights.matrix(layer + name, shape, shard, **{only: of(own)})
            for own in shards
            if of(own)
        ]
        assert torch.equal(torch.cat(slices, axis), whole), name
    sinks = weights.float32(f"{layer}attn.attn_sink", (8,))
    parts = [weights.float32(f"{layer}attn.attn_sink", (8,), own.heads) for own in shards]
    assert torch.equal(torch.cat(parts), sinks)
    experts = [i for own in shards for i in own.experts]
    assert experts == list(range(10))
    # Six blocks of 16; four ranks get two each, padded as it were to eight.
    channels = [len(own.shared_channels) for own in shards]
    assert channels == ([48, 48] if num_ranks == 2 else [32, 32, 32, 0])


def test_what_cannot_be_split_is_refused_before_a_weight_is_opened(
    pro: Path, tmp_path: Path
) -> None:
    shutil.copy(pro / "config.json", tmp_path)  # and no weights
    wanted = r"over 3 ranks: .* divide its o_groups 4 and so its 8 attention heads; .* be 1, 2, 4$"
    with pytest.raises(StartupError, match=wanted):
        load_target(tmp_path, parallel=Parallel(1, 3))
    with pytest.raises(StartupError, match=wanted):
        drafters.check_ranks(tmp_path, tmp_path, 3)
    llama = tiny_target(tmp_path / "llama")
    with pytest.raises(StartupError, match="over 2 ranks: llama targets run in one process"):
        load_target(llama, parallel=Parallel(0, 2))
    dense = tiny_drafter(tmp_path / "dspark", llama)
    with pytest.raises(StartupError, match=r"over 2 ranks: .* drafters run in one process"):
        load_drafter(dense, llama, torch.float32, "cpu", Parallel(0, 2))
    drafters.check_ranks(dense, llama, 1)


def test_a_tensor_is_missed_by_the_rank_that_holds_it(pro: Path, tmp_path: Path) -> None:
    for file in pro.glob("*-00001-*.safetensors"):
        tensors = load_file(file)
    del tensors["layers.0.ffn.experts.7.w1.weight"]
    tensors["layers.0.ffn.experts.1.w4.weight"] = torch.zeros(1)
    shutil.copy(pro / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"no tensor becomes 'model.layers.0.ffn.experts.7.w1"):
        load_deepseek_v4(tmp_path, parallel=Parallel(1, 2))
    # A tensor that has no place is nobody's, so every rank refuses it.
    with pytest.raises(LoadError, match=r"no place for: 'layers.0.ffn.experts.1.w4.weight'"):
        load_deepseek_v4(tmp_path, parallel=Parallel(0, 2))
