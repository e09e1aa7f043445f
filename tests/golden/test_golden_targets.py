"""Our targets against transformers on the same random weights, float32: logits and taps to 1e-4."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from common.models.dense import DenseTarget
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.nn.paged_kv import PagedKV
from common.testing.numeric import max_difference

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
CASES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": PLAIN}),
    "llama-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    ),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama-dynamic": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DYNAMIC}),
    "llama-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": PLAIN, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mha": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": PLAIN, "num_key_value_heads": 6},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": PLAIN}),
    "qwen3-tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    ),
    "qwen3-yarn": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": YARN}),
    "qwen3-yarn-mscale": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "rope_parameters": YARN
            | {"mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False, "beta_fast": 16.0}
        },
    ),
    "qwen3-yarn-attention-factor": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"rope_parameters": YARN | {"attention_factor": 1.3}},
    ),
}
NUM_TOKENS = 50  # past the original 32 positions of the scaled ropes
TAPS = (-1, 0, 1)


def reference(
    folder: Path, case: str, **save: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes a random checkpoint; returns ids [T], logits [T, V] and taps [T, 3 * d]."""
    config_class, model_class, extra = CASES[case]
    torch.manual_seed(1234)
    model = model_class(config_class(**(SIZES | extra))).eval()
    for name, parameter in model.named_parameters():
        scale = 0.2 if "norm" in name else 1.0
        center = 1.0 if "norm" in name else 0.0
        width = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        torch.nn.init.normal_(parameter, center, scale * width)
    model.save_pretrained(folder, **save)
    token_ids = torch.randint(SIZES["vocab_size"], (NUM_TOKENS,))
    with torch.no_grad():
        out = model(token_ids[None], output_hidden_states=True)
    taps = torch.cat([out.hidden_states[i + 1][0] for i in TAPS], dim=1)
    return token_ids, out.logits[0], taps


def run(
    model: DenseTarget, kv: PagedKV, chunks: list[tuple[int, torch.Tensor]], table: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feeds one sequence in chunks of (start, ids); returns all logits and taps."""
    logits, taps = [], []
    for start, token_ids in chunks:
        stop = start + len(token_ids)
        batch = AttentionBatch(
            [Segment(0, len(token_ids), stop, table)],
            torch.tensor(kv.slots_of(table, start, stop)),
            torch.arange(start, stop),
        )
        hidden, tapped = model.forward(token_ids, kv, batch, TAPS)
        assert tapped is not None
        logits.append(model.logits(hidden))
        taps.append(tapped)
    return torch.cat(logits), torch.cat(taps)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str, tmp_path: Path) -> None:
    token_ids, logits, taps = reference(tmp_path, case)
    model, report = load_target(tmp_path, torch.float32)
    assert report.num_tensors > 10 and set(report.dtypes) == {"float32"}
    assert model.config.eos_token_ids == (5,)
    kv = model.new_kv(num_blocks=12, kv_block_size=8)
    whole = run(model, kv, [(0, token_ids)], table=list(range(2, 9)))
    assert max_difference(whole[0], logits) < 1e-4
    assert max_difference(whole[1], taps) < 1e-4

    bounds = [0, 7, 8, 9, 30, 36, 37, NUM_TOKENS]
    chunks = [(a, token_ids[a:b]) for a, b in itertools.pairwise(bounds)]
    scattered = run(model, kv, chunks, table=[3, 11, 0, 7, 5, 1, 10])
    assert max_difference(scattered[0], logits) < 1e-4
    assert max_difference(scattered[1], taps) < 1e-4


@pytest.mark.parametrize("case", ["llama-llama3", "qwen3-yarn"])
def test_batch_invariant_equals_transformers_too(case: str, tmp_path: Path) -> None:
    token_ids, logits, _ = reference(tmp_path, case)
    model, _ = load_target(tmp_path, torch.float32, numerics="batch_invariant")
    kv = model.new_kv(num_blocks=12, kv_block_size=8)
    found, _ = run(model, kv, [(0, token_ids[:21]), (21, token_ids[21:])], list(range(7)))
    assert max_difference(found, logits) < 1e-4


def test_sharded_checkpoint_and_old_rope_spelling(tmp_path: Path) -> None:
    token_ids, logits, _ = reference(tmp_path, "llama-llama3", max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling | {"type": scaling.pop("rope_type")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_target(tmp_path, torch.float32)
    found, _ = run(model, model.new_kv(8, 8), [(0, token_ids)], list(range(7)))
    assert max_difference(found, logits) < 1e-4


def test_requests_side_by_side_do_not_mix(tmp_path: Path) -> None:
    """Three requests of different lengths in one ragged forward equal three forwards alone."""
    token_ids, logits, _ = reference(tmp_path, "qwen3")
    model, _ = load_target(tmp_path, torch.float32)
    kv = model.new_kv(num_blocks=16, kv_block_size=8)
    spans = [(0, 50, [0, 1, 2, 3, 4, 5, 6]), (0, 13, [8, 15]), (0, 1, [9])]
    segments, slots, positions, ids, row = [], [], [], [], 0
    for start, stop, table in spans:
        segments.append(Segment(row, stop - start, stop, table))
        slots += kv.slots_of(table, start, stop)
        positions += range(start, stop)
        ids.append(token_ids[start:stop])
        row += stop - start
    batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
    found = model.logits(model.forward(torch.cat(ids), kv, batch)[0])
    expected = torch.cat([logits[start:stop] for start, stop, _ in spans])
    assert max_difference(found, expected) < 1e-4
