"""What the verifier decides from config files, and what its building refuses; in this process."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from common.config import parse
from common.errors import ConfigError, LoadError, StartupError
from common.models.contracts import read_contract
from common.telemetry import Telemetry
from common.testing.configs import FLASH_0731, FLASH_MTP, QWEN8B, QWEN8B_TARGET
from common.testing.tiny import tiny_drafter, tiny_target
from verifier_svc.build import _drafter, build_service
from verifier_svc.config import VerifierConfig
from verifier_svc.planning import decide
from verifier_svc.service import VerifierService

LINK = ["--drafter", "unix:/nowhere"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = tiny_target(folder / "target", max_len=256)
    return target, tiny_drafter(folder / "draft", target)


def settings(*flags: Any) -> VerifierConfig:
    return parse(VerifierConfig, [str(f) for f in flags], prog="p", description="d", environ={})


def build(config: VerifierConfig) -> VerifierService:
    async def main() -> VerifierService:
        return build_service(config, decide(config), Telemetry())

    return asyncio.run(main())


def test_the_plan_comes_from_the_configs(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    plain = decide(settings("--model", target))
    assert plain.max_drafts == 0 and plain.plan.method is None
    drafted = decide(settings("--model", target, "--draft-model", draft, *LINK))
    assert drafted.max_drafts == 4 and drafted.plan.draft == "separate"
    told = json.loads(drafted.to_json())
    assert told["plan"]["method"] == "dspark" and told["draft"]["block_size"] == 4
    flags = ["--num-speculative-tokens", "2", "--k-policy", "lenient"]
    lenient = decide(settings("--model", target, "--draft-model", draft, *LINK, *flags))
    assert lenient.max_drafts == 2 and any("W01" in line for _, line in lenient.lines())


def only_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that holds nothing but a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (FLASH_0731, "ships a DSpark drafter (B = 5), which stays unused: start dspark-drafter"),
        (FLASH_MTP, "ships a classic MTP head, which stays unused: this verifier drafts only with"),
        (QWEN8B_TARGET, ""),
    ],
)
def test_a_target_nobody_wants_drafts_for_is_served_plainly(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    folder = only_config(tmp_path / "target", config)
    # Draft weights that a quantiser dropped do not matter either.
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"head.weight": "a"}}')
    decision = decide(settings("--model", folder))
    assert decision.max_drafts == 0 and decision.plan.method is None
    told = [line for _, line in decision.lines() if line.startswith("I05")]
    assert [says in line and str(folder) in line for line in told] == [True] * bool(says)
    assert decision.lines()[0] == (logging.INFO, "plan: no drafts")


def test_a_drafter_inside_the_target_is_named_by_the_same_folder(tmp_path: Path) -> None:
    folder = only_config(tmp_path / "target", FLASH_0731)
    decision = decide(settings("--model", folder, "--draft-model", folder, *LINK))
    assert (decision.plan.draft, decision.max_drafts) == ("self", 5)
    other = only_config(tmp_path / "copy", FLASH_0731)
    decision = decide(settings("--model", folder, "--draft-model", other, *LINK))
    assert (decision.plan.draft, decision.max_drafts) == ("separate", 5)


def test_warnings_of_target_and_draft_are_both_logged(tmp_path: Path) -> None:
    target = only_config(tmp_path / "qwen3-dspark", QWEN8B_TARGET)
    draft = only_config(tmp_path / "qwen3-eagle", QWEN8B)
    lines = decide(settings("--model", target, "--draft-model", draft, *LINK)).lines()
    warnings = [line for level, line in lines if level == logging.WARNING]
    assert len(warnings) == 2 and all(line.startswith("W04") for line in warnings)
    assert "'qwen3-dspark'" in warnings[0] and "'qwen3-eagle'" in warnings[1]


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ([*LINK], "needs --draft-model"),
        (["--sts", "f.json"], "no effect without --drafter"),
        (["--kv-blocks", "8", "--kv-memory-mb", "8"], "give one of them"),
        (["--max-running", "9", "--max-batch-tokens", "8"], "at least one row"),
        (["--method", "eagl"], "is not known"),
        (["--method", "ngram", "--num-speculative-tokens", "3"], "drafts only with 'dspark'"),
        (["--draft-model", "DRAFT", "--method", "dspark"], "needs a drafter service"),
        (["--draft-model", "DRAFT"], "needs a drafter service"),
        (["--num-speculative-tokens", "3"], "has nothing"),
        (["--draft-model", "TARGET", *LINK], "has nothing"),
        (["--draft-model", "DRAFT", "--num-speculative-tokens", "2", *LINK], "2"),
        (["--device", "tpu9"], "--device 'tpu9' is unknown"),
        (["--device", "meta"], "--device 'meta' is unknown"),
        (["--draft-model", "DRAFT", "--drafter", "here"], "--drafter 'here' is neither"),
        (["--draft-model", "DRAFT", "--drafter", "unix:"], "--drafter 'unix:' is neither"),
        (["--draft-model", "DRAFT", "--drafter", "a:65536"], "--drafter 'a:65536' is neither"),
        (["--device", "cuda"], "no CUDA device"),
        (["--max-context-len", "300"], "--max-context-len 300 is above the 256"),
        (["--draft-model", "DRAFT", "--sts", "/no/file", *LINK], "--sts /no/file cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_weights_are_read(
    folders: tuple[Path, Path], flags: list[str], fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("verifier_svc.build.load_target", touched)
    if flags == ["--device", "cuda"]:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = {"TARGET": folders[0], "DRAFT": folders[1]}
    with pytest.raises(StartupError) as caught:
        build(settings("--model", folders[0], *(names.get(flag, flag) for flag in flags)))
    assert fragment in caught.value.message


def test_checkpoints_that_lack_something_are_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        build(settings("--model", tmp_path / "nothing"))
    target = tiny_target(tmp_path / "t")
    (target / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"holds no tokenizer\.json"):
        build(settings("--model", target))
    wide = tiny_target(tmp_path / "w", hidden=256, layers=4)
    flags = ["--kv-memory-mb", "1", "--kv-block-size", "1024"]
    with pytest.raises(StartupError, match="takes 2097152 bytes, more than --kv-memory-mb 1"):
        build(settings("--model", wide, *flags))


def test_the_kv_cache_takes_what_it_may_and_bounds_the_context(
    folders: tuple[Path, Path],
) -> None:
    target, draft = folders
    small = build(settings("--model", target, "--dtype", "fp32", "--kv-blocks", "8"))
    assert small._admission.limits.max_context_len == 8 * 16
    # A token holds 2 layers x (k and v) x 2 heads x 8 values of fp32; with a drafter also one tap
    # of 32 values.
    plain = build(settings("--model", target, "--dtype", "fp32", "--kv-memory-mb", "1"))
    assert plain._engine.gauges().num_kv_blocks == (1 << 20) // (256 * 16)
    flags = ["--dtype", "fp32", "--kv-memory-mb", "1", "--draft-model", draft, *LINK]
    drafted = build(settings("--model", target, *flags))
    assert drafted._engine.gauges().num_kv_blocks == (1 << 20) // ((256 + 128) * 16)


@pytest.mark.parametrize(
    ("flags", "looks_ahead"),
    [
        ([], True),
        (["--device", "cuda:1"], False),
        (["--look-ahead", "auto", "--device", "cuda"], False),
        (["--look-ahead", "on", "--device", "cuda"], True),
        (["--look-ahead", "off"], False),
    ],
)
def test_looking_ahead_is_left_to_the_device_unless_it_is_told(
    folders: tuple[Path, Path], flags: list[str], looks_ahead: bool
) -> None:
    target, draft = folders
    config = settings("--model", target, "--draft-model", draft, *LINK, *flags)
    client = _drafter(config, read_contract(draft, target), Telemetry())
    assert client._settings.look_ahead is looks_ahead
