"""Flags and environment: precedence, ranges, and one clear line for every mistake."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import EXIT_BAD_SETTINGS, ServiceConfig, parse, run, setting, unread_variables
from common.errors import StartupError


@dataclasses.dataclass(frozen=True)
class Settings:
    model: Path = setting(dataclasses.MISSING, "checkpoint folder")
    service: ServiceConfig = dataclasses.field(default_factory=ServiceConfig)
    max_running: int = setting(8, "requests", low=1, high=64)
    min_survival: float = setting(0.0, "share", low=0, high=1)
    method: str | None = setting(None, "drafting method", choices=("dspark", "mtp"))
    batch_invariant: bool = setting(False, "same numbers at any width (100% of the time)")


def read(*argv: str, **environ: str) -> Settings:
    return parse(Settings, ["--model", "m", *argv], prog="p", description="d", environ=environ)


def test_defaults_flags_and_environment_in_that_order() -> None:
    assert read() == Settings(model=Path("m"))
    assert read(DSPARK_MAX_RUNNING="3").max_running == 3
    assert read("--max-running", "4", DSPARK_MAX_RUNNING="3").max_running == 4
    assert read("--listen", "unix:/a").service.listen == "unix:/a"
    assert read(DSPARK_DRAIN_SECONDS="1.5").service.drain_seconds == 1.5


@pytest.mark.parametrize(("raw", "value"), [("1", True), ("Yes", True), ("off", False)])
def test_booleans(raw: str, value: bool) -> None:
    assert read(DSPARK_BATCH_INVARIANT=raw).batch_invariant is value
    assert read("--batch-invariant").batch_invariant
    assert not read("--no-batch-invariant", DSPARK_BATCH_INVARIANT="1").batch_invariant


def test_an_empty_variable_switches_an_optional_setting_off() -> None:
    assert read(DSPARK_METHOD="").method is None


@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        (["--max-runing", "3"], {}, ["--max-runing"]),
        (
            ["--max-run", "3"],
            {},
            ["--max-run"],
        ),  # no abbreviations: they break when flags are added
        (["--max-running", "0"], {}, ["--max-running=0", "between 1 and 64"]),
        (["--max-running", "2.5"], {}, ["--max-running", "2.5", "whole number"]),
        (["--min-survival", "nan"], {}, ["--min-survival", "finite"]),
        (["--drain-seconds", "-1"], {}, ["--drain-seconds=-1", "at least 0"]),
        (["--method", "eagle"], {}, ["--method", "eagle", "dspark, mtp"]),
        ([], {"DSPARK_MAX_RUNNING": "many"}, ["DSPARK_MAX_RUNNING", "many"]),
        ([], {"DSPARK_BATCH_INVARIANT": "maybe"}, ["DSPARK_BATCH_INVARIANT", "maybe"]),
        (["--max-running"], {}, ["--max-running"]),
    ],
)
def test_mistakes_are_named(argv: list[str], environ: dict[str, str], names: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        read(*argv, **environ)
    for name in names:
        assert name in caught.value.message


def test_a_missing_required_setting_names_both_ways_to_give_it() -> None:
    with pytest.raises(StartupError, match=r"--model \(or DSPARK_MODEL\) is required"):
        parse(Settings, [], prog="p", description="d", environ={})


def test_variables_that_nothing_reads_are_reported() -> None:
    environ = {"DSPARK_MODLE": "x", "DSPARK_MODEL": "m", "DSPARK_LISTEN": "unix:/a", "HOME": "/"}
    assert unread_variables(Settings, environ) == ("DSPARK_MODLE",)


def test_help_names_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("model", "listen", "max-running", "batch-invariant", "otel"):
        assert f"--{name}" in text and f"DSPARK_{name.upper().replace('-', '_')}" in text


def test_a_startup_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise StartupError("no such folder:\n  /x")

    assert run("dspark-verifier", fail) == EXIT_BAD_SETTINGS
    assert capsys.readouterr().err == "dspark-verifier: no such folder: /x\n"
    assert run("dspark-verifier", lambda: None) == 0


def test_thread_limits_come_before_torch() -> None:
    code = (
        "from common.config import limit_threads; limit_threads(1); import torch;"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
