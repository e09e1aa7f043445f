"""Every way a checkpoint can be wrong is a LoadError that names the tensor or the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import LoadError
from common.loading.safetensors_files import INDEX, SINGLE
from common.models.dspark_qwen3 import load_drafter, load_projector
from common.models.registry import load_target
from common.testing.tiny import tiny_drafter, tiny_target

Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrites model.safetensors after `change` had its way with the tensors."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_config(folder: Path, **keys: object) -> None:
    """Rewrites config.json with other values."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_report_counts_what_was_read(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "qwen3", num_shards=3, dtype=torch.bfloat16)
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    _, report = load_target(folder, torch.float32)
    tensors = [t for f in folder.glob("*.safetensors") for t in load_file(f).values()]
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert report.dtypes == {"bfloat16": len(tensors)}
    assert json.loads(report.to_json())["path"] == str(folder)


def test_what_is_left_out_on_purpose_is_reported(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, bigram=False)  # tied
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(
        folder, lambda t: t.update({"lm_head.weight": torch.zeros(64, 32), inverse: torch.ones(4)})
    )
    assert load_target(folder, torch.float32)[1].ignored == ("lm_head.weight", inverse)


WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' .32. is missing"),
    "unexpected": (
        lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(1)}),
        "no place for: 'model.layers.7.mlp.up_proj.weight'",
    ),
    "misshapen": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(32, 63)}),
        r"'model.layers.1.mlp.down_proj.weight' has shape .32, 63., .* asks for .32, 64.",
    ),
    "quantised": (
        lambda t: t.update({"lm_head.weight": torch.ones(64, 32, dtype=torch.int8)}),
        "'lm_head.weight' is int8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    edit(tiny_target(tmp_path), change)
    with pytest.raises(LoadError, match=message):
        load_target(tmp_path, torch.float32)


def test_truncated_file(tmp_path: Path) -> None:
    file = tiny_target(tmp_path) / SINGLE
    for size in (len(file.read_bytes()) - 1, 1000, 5, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(LoadError, match=r"broken or was cut off .* download it again"):
            load_target(tmp_path, torch.float32)


def test_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read .*config\.json: No such file"):
        load_target(tmp_path / "nowhere")
    tiny_target(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pickled weights .* never"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not valid JSON"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="holds a list"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "x.bin"]
)
def test_index_may_not_leave_the_folder(name: str, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "inside", num_shards=2)
    (tmp_path / "model.safetensors").write_bytes(b"")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadError, match="inside the checkpoint folder"):
        load_target(folder)


def test_index_must_agree_with_its_files(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, num_shards=2)
    index = json.loads((folder / INDEX).read_text())
    moved = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=f"'model.norm.weight' is listed in None but .*{moved}"):
        load_target(folder)
    (folder / moved).unlink()
    with pytest.raises(LoadError, match=f"cannot open .*{moved}"):
        load_target(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not a known target"),
        ({"architectures": None}, "None is not a known target"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 3}, "3 query heads cannot share 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": 3}, "layer_types is 3; a list"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; true or false"),
        ({"rope_scaling": ["linear"]}, r"rope_scaling is \['linear'\]; an object"),
        ({"eos_token_id": 64}, "eos_token_id 64 is no id of a vocabulary of 64"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id '2' is no id"),
        ({"eos_token_id": {}}, "eos_token_id {} is no id"),
    ],
)
def test_config_that_asks_for_more(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    edit_config(tiny_target(tmp_path, "qwen3"), **keys)
    with pytest.raises(LoadError, match=message):
        load_target(tmp_path)


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    tiny_target(tmp_path)
    assert load_target(tmp_path)[0].config.eos_token_ids == (63,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_target(tmp_path)[0].config.eos_token_ids == (3, 4)


DRAFTER_CONFIG: list[tuple[dict[str, object], str]] = [
    ({"architectures": ["Qwen3ForCausalLM"]}, "is not 'Qwen3DSparkModel'"),
    ({"target_layer_ids": [0, 2]}, "must rise strictly inside -1..1"),
    ({"target_layer_ids": [1, 0]}, "must rise strictly"),
    ({"target_layer_ids": []}, "must rise strictly"),
    ({"target_layer_ids": [0]}, r"'fc.weight' has shape .32, 64., .* asks for .32, 32."),
    ({"mask_token_id": None}, "mask_token_id is None; an integer"),
    ({"enable_confidence_head": "false"}, "enable_confidence_head is 'false'; true or false"),
    ({"mask_token_id": 64}, "mask_token_id 64 must lie inside the embedding's 64 rows"),
    ({"markov_head_type": "fir"}, "'fir' is unknown; known: vanilla, gated, rnn"),
    ({"markov_head_type": "gated"}, "'markov_head.gate_proj.weight' .32, 64. is missing"),
    ({"markov_rank": 0}, "confidence_head_with_markov needs a markov_rank"),
    ({"hidden_size": 16}, "must equal the target's 32 and 64"),
    ({"head_dim": 4}, "head_dim 4 must equal the target's 8"),
    ({"draft_vocab_size": 65}, "draft_vocab_size 65 exceeds vocab_size 64"),
    ({"draft_vocab_size": 60}, r"'d2t' .60. is missing"),
    ({"enable_confidence_head": False}, "no place for: 'confidence_head.proj.bias'"),
]


@pytest.mark.parametrize(("keys", "message"), DRAFTER_CONFIG)
def test_drafter_config(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=3)
    edit_config(tiny_drafter(tmp_path / "drafter", target), **keys)
    with pytest.raises(LoadError, match=message):
        load_drafter(tmp_path / "drafter", target)


def test_drafter_tensors(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=3)
    folder = tiny_drafter(tmp_path / "drafter", target, draft_vocab=10)
    d2t = load_file(folder / SINGLE)["d2t"]
    for wrong in (d2t + 64, torch.zeros_like(d2t).index_fill_(0, torch.tensor([1]), -1)):
        edit(folder, lambda t, wrong=wrong: t.update(d2t=wrong))
        with pytest.raises(LoadError, match=r"d2t must map draft ids one to one into 0\.\.63"):
            load_drafter(folder, target)
    edit(folder, lambda t: t.pop("confidence_head.proj.bias"))
    edit(folder, lambda t: t.update(d2t=d2t))
    with pytest.raises(LoadError, match=r"'confidence_head.proj.bias' .1. is missing"):
        load_drafter(folder, target)


def test_head_that_a_drafter_lacks_comes_from_the_target(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=3)
    folder = tiny_drafter(tmp_path / "drafter", target)
    edit(
        folder, lambda t: t.update({"lm_head.weight": load_file(target / SINGLE)["lm_head.weight"]})
    )
    own, _ = load_drafter(folder, target, torch.float32)
    edit(folder, lambda t: t.pop("lm_head.weight"))
    shared, _ = load_drafter(folder, target, torch.float32)
    x = torch.randn(3, 32)
    assert torch.equal(own.lm_head(x), shared.lm_head(x))
    reduced = tiny_drafter(tmp_path / "reduced", target, draft_vocab=10)
    edit(reduced, lambda t: t.pop("lm_head.weight"))
    few, _ = load_drafter(reduced, target, torch.float32)
    torch.testing.assert_close(few.lm_head(x), own.lm_head(x)[:, few.d2t])
    edit(reduced, lambda t: t.pop("d2t"))
    with pytest.raises(LoadError, match=r"'d2t' .10. is missing"):
        load_drafter(reduced, target)


def test_the_targets_rope_rules_and_is_noted(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=3)
    folder = tiny_drafter(tmp_path / "drafter", target)
    edit_config(folder, rope_theta=5.0)
    model, report = load_drafter(folder, target)
    assert model.config.rope.theta == 10000.0
    assert len(report.notes) == 1 and '"theta":5.0' in report.notes[0]


def test_projector_alone_equals_the_drafters(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", layers=3)
    folder = tiny_drafter(tmp_path / "drafter", target)
    model, _ = load_drafter(folder, target, torch.float32)
    rows = torch.randn(5, model.config.feature_width)
    assert torch.equal(load_projector(folder, target, torch.float32)(rows), model.project(rows))
