"""DeepSeek-V4 checkpoints: every tensor accounted for, repacked formats, refusals, the cache's
size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.detect import names
from common.errors import LoadError, StartupError
from common.loading.safetensors_files import read_json
from common.models.deepseek_v4.cache import recent_blocks_needed
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.nn.attention import AttentionBatch, Segment
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.repacks import repack_fp8, repack_nvfp4, rewritten

IDS = torch.arange(40) * 7 % 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=16)


def logits_of(model: DeepseekV4Target, ids: Tensor = IDS) -> Tensor:
    kv, table, n = model.new_kv(8, 16), [3, 6, 1], len(ids)
    slots = torch.tensor(kv.slots_of(table, 0, n))
    batch = AttentionBatch([Segment(0, n, n, table)], slots, torch.arange(n))
    return model.logits(model.forward(ids, kv, batch)[0])


@pytest.mark.parametrize("drafter", ["dspark", "mtp", "none"])
def test_every_tensor_is_read_or_listed(tmp_path: Path, drafter: Any) -> None:
    tiny_deepseek_v4(tmp_path, "pro", drafter)
    held = read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    _, report = load_deepseek_v4(tmp_path, torch.float32)
    num_drafter = sum(name.startswith("mtp.") for name in held)
    assert report.num_tensors == len(held) - num_drafter and not report.ignored
    said = f"model-00002-of-00002.safetensors not opened: its {num_drafter} tensors do not concern"
    assert [note[: len(said)] for note in report.notes] == ([said] if num_drafter else [])
    config = read_json(tmp_path / "config.json")
    per_layer = 3 * config["n_routed_experts"]
    assert report.dtypes["int8"] == per_layer * config["num_hidden_layers"]
    assert report.dtypes["float8_e8m0fnu"] == report.dtypes["int8"] + report.dtypes["float8_e4m3fn"]
    assert report.dtypes["int64"] == config["num_hash_layers"]


MISSING = [
    "embed.weight",
    "layers.2.attn.compressor.ape",
    "layers.4.attn.indexer.compressor.wgate.weight",
    "layers.1.attn.wq_a.scale",
    "layers.3.ffn.experts.5.w2.scale",
    "layers.0.ffn.shared_experts.w2.weight",
    "layers.0.ffn.gate.tid2eid",
    "layers.3.ffn.gate.bias",
    "hc_head_scale",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_an_error(folder: Path, tmp_path: Path, name: str) -> None:
    rewritten(folder, tmp_path, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(LoadError, match="no tensor becomes"):
        load_deepseek_v4(tmp_path)


EXTRA: list[tuple[str, Tensor]] = [
    ("layers.1.attn.compressor.ape", torch.zeros(1)),  # layer 1 has no compressor
    ("layers.0.ffn.gate.bias", torch.zeros(8)),  # a hash layer has none
    ("layers.2.attn_norm.scale", torch.zeros(1)),
    ("layers.5.attn_norm.weight", torch.zeros(64)),
    ("model.norm.weight", torch.zeros(64)),
]


@pytest.mark.parametrize(("name", "value"), EXTRA)
def test_a_tensor_without_a_place_is_an_error(
    folder: Path, tmp_path: Path, name: str, value: Tensor
) -> None:
    rewritten(folder, tmp_path, lambda tensors: tensors.update({name: value}))
    with pytest.raises(LoadError, match=f"no place for: '{name}'"):
        load_deepseek_v4(tmp_path)


def test_a_missing_rename_fails_even_on_one_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `shared_experts.w2` -> `down_proj` padding would pick the wrong axis."""
    rules = tuple(rule for rule in names._LAYER_RULES if rule[0] != "ffn.shared_experts.w2")
    monkeypatch.setattr(names, "_LAYER_RULES", rules)
    with pytest.raises(LoadError, match=r"shared_experts\.down_proj\.weight"):
        load_deepseek_v4(folder)


def test_experts_out_of_range_and_odd_dtypes_are_refused(folder: Path, tmp_path: Path) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    rewritten(folder, tmp_path, lambda tensors: tensors[name].fill_(8))
    with pytest.raises(LoadError, match=r"outside 0\.\.7"):
        load_deepseek_v4(tmp_path)
    name = "layers.2.attn.compressor.wkv.weight"
    rewritten(folder, tmp_path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(LoadError, match="float8_e4m3fn"):
        load_deepseek_v4(tmp_path)


def test_repacked_experts_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    model, _ = load_deepseek_v4(folder, torch.float32)
    want = logits_of(model)
    rewritten(folder, tmp_path / "fp8", repack_fp8, expert_dtype="fp8")
    assert torch.allclose(logits_of(load_deepseek_v4(tmp_path / "fp8", torch.float32)[0]), want)
    rewritten(folder, tmp_path / "nvfp4", repack_nvfp4)
    model, report = load_deepseek_v4(tmp_path / "nvfp4", torch.float32)
    assert torch.equal(logits_of(model), want)
    kinds = {
        name.rsplit(".", 1)[-1] if name.startswith("layers") else "mtp" for name in report.ignored
    }
    assert kinds == {"input_scale", "mtp"}, "a single file holds the drafter's tensors too"


def test_fp8_experts_under_an_fp4_config_are_refused(folder: Path, tmp_path: Path) -> None:
    rewritten(folder, tmp_path, repack_fp8)
    with pytest.raises(LoadError, match="weight_scale_inv"):
        load_deepseek_v4(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("hidden_act", "gelu"),
        ("n_shared_experts", 2),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 2),
        ("compress_ratios", [0, 0, 4]),
        ("compress_ratios", [0, 0, 4, 64, 4]),
        ("compress_ratios", [0, 0, 4, 128, 4, 4]),
        ("qk_rope_head_dim", 64),
        ("o_groups", 3),
        ("num_experts_per_tok", 9),
        ("swiglu_limit", None),
        ("hidden_size", "64"),
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}),
        ("rope_scaling", {"type": "longrope"}),
    ],
)
def test_configs_that_ask_for_something_else(
    folder: Path, tmp_path: Path, key: str, value: Any
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(read_json(folder / "config.json") | {key: value})
    )
    with pytest.raises(LoadError, match=str(tmp_path)) as error:
        load_deepseek_v4(tmp_path)
    assert key in str(error.value) or "rope type" in str(error.value)


def test_bf16_runs_and_stays_near(folder: Path) -> None:
    exact = logits_of(load_deepseek_v4(folder, torch.float32)[0])
    rough = logits_of(load_deepseek_v4(folder, torch.bfloat16)[0])
    assert (exact.argmax(1) == rough.argmax(1)).float().mean() > 0.9


def test_a_poisoned_request_leaves_nothing_behind(folder: Path) -> None:
    """NaN that one request wrote must not reach another one that gets its blocks, masked or not."""
    model, _ = load_deepseek_v4(folder, torch.float32)
    want = logits_of(model, IDS[:11])
    with torch.inference_mode():
        model.embed_tokens[95] = torch.nan
    kv, table = model.new_kv(3, 16), [2, 0, 1]

    def run(ids: Tensor) -> Tensor:
        slots = torch.tensor(kv.slots_of(table, 0, len(ids)))
        segment = Segment(0, len(ids), len(ids), table)
        batch = AttentionBatch([segment], slots, torch.arange(len(ids)))
        return model.logits(model.forward(ids, kv, batch)[0])

    assert run(torch.full((48,), 95)).isnan().all()
    assert torch.allclose(run(IDS[:11]), want, atol=1e-5)


def test_the_cache_fits_its_block_size_and_its_promise(folder: Path) -> None:
    model, _ = load_deepseek_v4(folder, torch.float32)
    with pytest.raises(StartupError, match=r"\[16\] do not divide"):
        model.new_kv(4, 24)
    full, bounded = model.new_kv(512, 16), model.new_kv(512, 16, num_recent_blocks=16)
    assert full.num_bytes == sum(
        t.numel() * t.element_size()
        for layer in full.layers
        for t in (layer.rows, layer.raw, layer.index_raw, layer.index_keys)
        if t is not None
    )
    assert bounded.num_bytes < full.num_bytes / 8
    # A window of 8 and groups of 16: 15 positions back, 16 to be set back by, and a row or more.
    assert recent_blocks_needed(model.config, 16, max_requests=4, max_batch_tokens=64) == 4 * 4 + 4
