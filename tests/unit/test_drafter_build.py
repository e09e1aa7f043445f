"""The drafter's settings, planning and building: what cannot work is refused first."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import parse
from common.errors import ConfigError, StartupError
from common.testing.tiny import tiny_drafter, tiny_target
from drafter_svc import build
from drafter_svc.config import DrafterConfig
from drafter_svc.planning import decide

torch.set_num_threads(1)


def load(config: DrafterConfig) -> build.LoadedDrafter:
    return build.load(config, decide(config))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    target = tiny_target(folder / "target", layers=3, max_len=96)
    draft = tiny_drafter(folder / "draft", target)
    return DrafterConfig(model=draft, target_model=target, dtype="fp32")


@pytest.fixture
def changed(config: DrafterConfig, tmp_path: Path) -> Callable[..., DrafterConfig]:
    """The drafter's config.json with other values, and no weights beside it."""

    def make(**values: Any) -> DrafterConfig:
        raw = json.loads((config.model / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **values}))
        return replace(config, model=tmp_path)

    return make


def test_a_good_pair_loads_and_says_what_it_is(config: DrafterConfig) -> None:
    loaded = load(config)
    assert loaded.contract.target_layer_ids == (0, 1) and loaded.contract.target_family == "llama"
    assert loaded.feature_width == 64 and loaded.report.num_tensors == 19
    assert json.loads(loaded.verdict_json)["kind"] == "drafter"
    assert loaded.limits.max_context_len == 96  # the target's, the KV would hold more
    assert loaded.limits.max_sessions_per_link == 256


def test_kv_is_sized_by_memory_or_by_blocks(config: DrafterConfig) -> None:
    slot_bytes = 2 * 2 * 8 * 4  # k and v, 2 heads of 8, fp32, 1 layer
    sized = load(replace(config, kv_memory_mb=1))
    assert sized.limits.num_blocks == (1 << 20) // (slot_bytes * 16)
    small = load(replace(config, kv_blocks=3))
    assert (small.limits.num_blocks, small.limits.max_context_len) == (3, 48)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no drafter": ({"architectures": ["LlamaForCausalLM"]}, "E03", "DSparkModel"),
    "another target": ({"hidden_size": 64}, "E19", "hidden size"),
    "fill-in": ({"sample_from_anchor": False}, "E05", "fill-in layout"),
    "taps": ({"target_layer_ids": [0, 7]}, "E14", "7"),
    "mask": ({"mask_token_id": 64}, "E15", "64"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_cannot_work_is_refused_by_rule(
    changed: Callable[..., DrafterConfig], case: str
) -> None:
    values, code, said = BAD_CONFIGS[case]
    with pytest.raises(ConfigError) as caught:
        decide(changed(**values))
    assert caught.value.code == code and said in caught.value.message


def test_a_missing_folder_is_refused(config: DrafterConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        decide(replace(config, model=tmp_path / "nowhere"))


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "room": ({"kv_blocks": 1, "kv_block_size": 4}, "cannot hold one session of 5 tokens"),
    "device": ({"device": "tpu9"}, "--device 'tpu9' is unknown"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused(config: DrafterConfig, case: str) -> None:
    values, said = BAD_SETTINGS[case]
    with pytest.raises(StartupError) as caught:
        load(replace(config, **values))
    assert said in caught.value.message


CONTRADICTIONS = {
    "--kv-blocks 9 and --kv-memory-mb 1": ["--kv-blocks", "9", "--kv-memory-mb", "1"],
    "must not be above --max-sessions 4": [
        "--max-sessions", "4", "--max-sessions-per-verifier", "5",
    ],
    "--target-model .* is required": [],
}  # fmt: skip


@pytest.mark.parametrize("said", CONTRADICTIONS)
def test_contradictory_flags_are_refused(said: str) -> None:
    flags = ["--model", "m", *CONTRADICTIONS[said]]
    if "required" not in said:
        flags += ["--target-model", "t"]
    with pytest.raises(StartupError, match=said):
        parse(DrafterConfig, flags, prog="p", description="d", environ={})


def test_the_default_port_is_not_the_verifiers() -> None:
    flags = ["--model", "m", "--target-model", "t"]
    config = parse(DrafterConfig, flags, prog="p", description="d", environ={})
    assert config.service.listen == "127.0.0.1:50052"
