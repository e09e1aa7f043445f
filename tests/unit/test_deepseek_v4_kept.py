"""V4 with its block-quantised weights kept as stored, as on CUDA, against the dequantised model.

Here the reference multiplies, so this proves the wiring: which weight meets which rows. The kernel
is compared with that reference elsewhere.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.loading.safetensors_files import LoadReport, read_json
from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.drafter import DSparkV4, drafter_config
from common.models.deepseek_v4.experts import StackedExperts
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.deepseek_v4.moe import MixtureOfExperts
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.nn.attention import AttentionBatch, Segment
from common.nn.linear import Linear
from common.nn.quant_linear import QuantLinear, keeps_quantised
from common.nn.vocab_head import VocabHead
from common.parallel import ALONE, Parallel
from common.testing.deepseek_v4 import Kind, plain_weights, tiny_deepseek_v4
from common.testing.numeric import max_difference
from common.testing.repacks import repack_fp8, repack_nvfp4, rewritten

IDS = torch.arange(40) * 7 % 90
Repack = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module", params=["flash", "pro"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    kind: Kind = request.param
    return tiny_deepseek_v4(tmp_path_factory.mktemp(kind), kind, compress_rate_hca=16)


class OneOfTwo(Parallel):
    """A rank that keeps what it computed to itself."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)

    def sum(self, x: Tensor, *, in_rank_order: bool = False) -> Tensor:
        """Its part."""
        return x


def weights_of(folder: Path, keep: bool, parallel: Parallel = ALONE) -> DeepseekV4Weights:
    """The target's, float32 on CPU."""
    config = deepseek_v4_config(folder, read_json(folder / "config.json"))
    return DeepseekV4Weights(folder, config, "target", torch.float32, "cpu", parallel, keep)


def target(folder: Path, keep: bool) -> tuple[DeepseekV4Target, LoadReport]:
    """Whole."""
    weights = weights_of(folder, keep)
    with torch.inference_mode():
        return DeepseekV4Target(weights.config, weights), weights.finish()


def logits_and_taps(model: DeepseekV4Target) -> tuple[Tensor, Tensor]:
    """After one prefill that crosses the window and the groups of every layer kind."""
    kv, table = model.new_kv(8, 16), [3, 6, 1]
    slots = torch.tensor(kv.slots_of(table, 0, len(IDS)))
    batch = AttentionBatch([Segment(0, 40, 40, table)], slots, torch.arange(40))
    hidden, taps = model.forward(IDS, kv, batch, (2, 3, 4))
    assert taps is not None
    return model.logits(hidden), taps


@pytest.mark.parametrize("repack", [None, repack_fp8, repack_nvfp4])
def test_the_target_computes_the_same(folder: Path, tmp_path: Path, repack: Repack | None) -> None:
    if repack is not None:
        more = {"expert_dtype": "fp8"} if repack is repack_fp8 else {}
        folder = rewritten(folder, tmp_path, repack, **more)
    plain, told = target(folder, keep=False)
    kept, told_kept = target(folder, keep=True)
    for found, expected in zip(logits_and_taps(kept), logits_and_taps(plain), strict=True):
        assert max_difference(found, expected) < 1e-4
    for layer in kept.layers:
        assert isinstance(layer.experts.experts, StackedExperts)
        assert isinstance(layer.attention.wo_b, QuantLinear)
        assert isinstance(layer.attention.wo_a, Tensor), "a plain matrix in the released code too"
    assert isinstance(kept.lm_head, VocabHead)  # always dequantised
    notes = [note for note in told_kept.notes if "kept" in note]
    assert not [note for note in told.notes if "kept" in note]
    num_experts = 3 * plain.config.num_experts * plain.config.num_layers
    expert_format = {None: "mxfp4/32", repack_fp8: "fp8/128", repack_nvfp4: "nvfp4/16"}[repack]
    counts = {note.split()[4]: int(note.split()[0]) for note in notes}
    # Per layer: wq_a, wkv, wq_b, wo_b, three of the shared expert; and CSA's index queries.
    num_other = 7 * 5 + 1 * sum(c is not None and c.overlap for c in plain.config.compressions)
    assert sum(counts.values()) == num_experts + num_other
    assert counts[expert_format] == num_experts + num_other * (expert_format == "fp8/128")


def test_matrices_that_are_stored_differently_meet_as_real_numbers(
    folder: Path, tmp_path: Path
) -> None:
    """Half of a stacked layer, and one expert of a layer, in bf16."""
    plain, _ = target(folder, keep=False)

    def edit(tensors: dict[str, Tensor]) -> None:
        weights = plain_weights(folder)
        for module in ("0.ffn.shared_experts.w1", *(f"3.ffn.experts.5.w{i}" for i in (1, 2, 3))):
            del tensors[f"layers.{module}.scale"]
            # Every value of these formats is one of bf16's.
            tensors[f"layers.{module}.weight"] = weights[f"layers.{module}.weight"].bfloat16()

    kept, _ = target(rewritten(folder, tmp_path, edit), keep=True)
    shared = kept.layers[0].experts.shared
    assert shared and isinstance(shared.gate_up, Linear) and isinstance(shared.down, QuantLinear)
    stacked = [isinstance(layer.experts.experts, StackedExperts) for layer in kept.layers]
    assert stacked == [True, True, True, False, True]
    for found, expected in zip(logits_and_taps(kept), logits_and_taps(plain), strict=True):
        assert max_difference(found, expected) < 1e-4


def test_the_drafter_computes_the_same(folder: Path, tmp_path: Path) -> None:
    """Also from an NVFP4 repack, whose `mtp.*` stays MXFP4."""
    config, nvfp4 = drafter_config(folder), rewritten(folder, tmp_path, repack_nvfp4)
    results = []
    for source, keep in ((folder, False), (folder, True), (nvfp4, False), (nvfp4, True)):
        weights = DeepseekV4Weights(
            source, config.model, "drafter", torch.float32, "cpu", ALONE, keep
        )
        with torch.inference_mode():
            model = DSparkV4(config, weights)
        assert isinstance(model.project.proj, QuantLinear if keep else Linear)
        num_experts = 3 * 3 * config.model.num_experts
        said = any(f"{num_experts} matrices kept as mxfp4/32" in n for n in weights.finish().notes)
        assert said == keep
        kv, table = model.new_kv(4, 16), [[2, 0, 1]]
        generator = torch.Generator().manual_seed(0)
        rows = model.project(torch.randn(20, config.feature_width, generator=generator))
        slots = torch.tensor(kv.slots_of(table[0], 0, 20))
        model.ingest(rows, kv, slots, torch.arange(20))
        hidden, logits = model.block(torch.tensor([5]), torch.tensor([20]), 5, kv, table)
        results.append(torch.cat([rows.flatten(), hidden.flatten(), logits.flatten()]))
    for found in results[1:]:
        assert max_difference(found, results[0]) < 1e-4


@pytest.mark.parametrize("by_token_id", [True, False])
def test_ranks_add_up(folder: Path, by_token_id: bool) -> None:
    """Each rank's experts, its channels of the shared one, and nothing of the other's."""
    prefix = f"model.layers.{0 if by_token_id else 3}.ffn."
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))

    def mixture(keep: bool, parallel: Parallel) -> Tensor:
        weights = weights_of(folder, keep, parallel)
        with torch.inference_mode():
            experts = MixtureOfExperts(weights.config, weights, prefix, by_token_id)
            return experts(x, IDS[:9], apart=False)

    parts = [mixture(True, OneOfTwo(rank)) for rank in (0, 1)]
    assert max_difference(parts[0] + parts[1], mixture(False, ALONE)) < 1e-5
    for rank, part in enumerate(parts):
        assert part.abs().max() > 0
        assert max_difference(part, mixture(False, OneOfTwo(rank))) < 1e-5


def test_a_slice_that_starts_inside_a_block_keeps_its_scales(folder: Path) -> None:
    """Columns of wo_b, as ranks share them, with the scales of blocks of 128."""
    config = weights_of(folder, True).config
    cols = config.o_groups * config.o_lora_rank
    for rank in (0, 1):
        for name in (f"model.layers.{i}.attn.wo_b" for i in range(3)):
            kept, plain = (weights_of(folder, keep, OneOfTwo(rank)) for keep in (True, False))
            part = (name, None, config.hidden_size)
            layer = kept.linear(cols, part, only_cols=kept.shards.group_rows)
            assert isinstance(layer, QuantLinear)
            expected = plain.matrix(name, (config.hidden_size, cols))
            own = expected[:, plain.shards.group_rows]
            assert torch.equal(layer.weight.dequantised(), own)


def test_the_cpu_dequantises() -> None:
    assert not keeps_quantised("cpu")
