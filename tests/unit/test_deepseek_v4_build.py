"""Building both services on V4 checkpoints: sizes, refusals, the contract both sides derive."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.config import parse
from common.errors import ConfigError, LoadError, StartupError
from common.loading.safetensors_files import read_json
from common.models.contracts import read_contract
from common.telemetry import Telemetry
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.tiny import tiny_target
from drafter_svc import build as drafter_build
from drafter_svc import planning as drafter_planning
from drafter_svc.build import LoadedDrafter
from drafter_svc.config import DrafterConfig
from verifier_svc import kv_sizing
from verifier_svc.build import build_service
from verifier_svc.config import VerifierConfig
from verifier_svc.planning import decide
from verifier_svc.service import VerifierService

LINK = ["--drafter", "unix:/nowhere"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=16)


def verifier(*flags: Any) -> VerifierService:
    config = parse(VerifierConfig, list(map(str, flags)), prog="p", description="d", environ={})

    async def main() -> VerifierService:
        return build_service(config, decide(config), Telemetry())

    return asyncio.run(main())


def drafter(*flags: Any) -> LoadedDrafter:
    config = parse(DrafterConfig, list(map(str, flags)), prog="p", description="d", environ={})
    return drafter_build.load(config, drafter_planning.decide(config))


def edited(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of config.json with other values, without weights."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps(read_json(folder / "config.json") | config))
    return to


def test_both_sides_derive_the_same_contract(folder: Path) -> None:
    loaded = drafter("--model", folder, "--target-model", folder, "--dtype", "fp32")
    contract = read_contract(folder, folder)
    assert loaded.contract == contract and contract.context_window == 8
    assert (contract.target_family, contract.drafter_family) == (
        "deepseek_v4",
        "deepseek_v4_dspark",
    )
    assert contract.target_layer_ids == (2, 3, 4) and loaded.feature_width == 3 * 64
    # Whatever the window leaves behind takes no room, so the context may be the model's.
    small = drafter("--model", folder, "--target-model", folder, "--kv-blocks", "4")
    assert small.limits.max_context_len == 4096 and small.limits.num_blocks == 4


def test_a_drafter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", folder, "--target-model"]
    with pytest.raises(LoadError, match=r"rope is .* there, .* here"):
        drafter(*flags, edited(folder, tmp_path / "rope", rope_theta=5000))
    with pytest.raises(LoadError, match="num_hash_layers is 0 there, 2 here"):
        unhashed = edited(folder, tmp_path / "hash", num_hash_layers=0)
        drafter("--model", unhashed, "--target-model", folder)
    with pytest.raises(ConfigError, match="hidden size"):
        drafter(*flags, edited(folder, tmp_path / "wide", hidden_size=128))
    with pytest.raises(StartupError, match=r"6 KV blocks of 4 tokens cannot hold .* 27 tokens"):
        drafter(*flags, folder, "--kv-blocks", "6", "--kv-block-size", "4")
    drafter(*flags, folder, "--kv-blocks", "7", "--kv-block-size", "4")


def test_a_target_that_is_stored_in_another_way_is_the_same_model(
    folder: Path, tmp_path: Path
) -> None:
    """And one whose texts end with other tokens."""
    repack = edited(folder, tmp_path / "repack", expert_dtype="fp8", eos_token_id=[94, 95])
    loaded = drafter("--model", folder, "--target-model", repack)
    assert loaded.contract == read_contract(folder, folder)


def test_block_sizes_and_rooms_that_cannot_work_are_refused(folder: Path, tmp_path: Path) -> None:
    drafted = ["--draft-model", folder, *LINK]
    with pytest.raises(StartupError, match="--kv-block-size 24 must be a multiple of 16"):
        verifier("--model", folder, "--kv-block-size", "24")
    with pytest.raises(StartupError, match="more than --kv-memory-mb 1 holds"):
        verifier("--model", folder, *drafted, "--kv-memory-mb", "1", "--kv-block-size", "1024")
    fine = tiny_deepseek_v4(tmp_path / "csa", compress_ratios=[0, 4, 4])
    with pytest.raises(StartupError, match="--kv-block-size 4 must be at least 7"):
        verifier("--model", fine, "--draft-model", fine, *LINK, "--kv-block-size", "4")


@pytest.mark.parametrize(("form", "width"), [("raw_layers", 3 * 64), ("projected", 64)])
def test_a_long_context_takes_entries_only(folder: Path, form: str, width: int) -> None:
    """One request of 4096 tokens: 256 blocks of 16, of which 4 + 512 // 16 keep rows."""
    flags = ["--model", folder, "--draft-model", folder, *LINK, "--feature-form", form]
    service = verifier(*flags, "--max-running", "1")
    runner = service._engine._runner
    assert service._admission.limits.max_context_len == 4096
    assert (runner._kv.num_blocks, runner._kv.num_slots) == (256, (4 + 32) * 16)
    assert runner.features.width == width
    assert runner.features.num_bytes == runner._kv.num_slots * width * 2


def test_the_default_memory_holds_the_windows_of_all_running_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released sizes: one request's window rows take more than a quarter of the usual default."""
    monkeypatch.setattr(kv_sizing, "DEFAULT_KV_MEMORY_MB", 1)
    flags = ["--model", folder, "--max-running", "16", "--max-batch-tokens", "64"]
    default = verifier(*flags)._engine._runner._kv
    assert default.num_blocks == 16 * 4 + 64 // 16
    assert default.num_bytes > 1 << 20
    asked = verifier(*flags, "--kv-memory-mb", "1")._engine._runner._kv
    assert asked.num_blocks < default.num_blocks and asked.num_bytes <= 1 << 20


def test_a_dense_drafter_config_is_no_v4_drafter(folder: Path, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "llama")
    with pytest.raises(ConfigError):
        verifier("--model", folder, "--draft-model", target, *LINK)
