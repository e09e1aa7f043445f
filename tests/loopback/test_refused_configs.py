"""Both services as processes on folders that hold nothing but a config.json: refused at once."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from common.testing import configs as c
from common.testing.configs import DROP, with_

ROOT = Path(__file__).resolve().parents[2]
MAX_CPU_S = 2.0  # of the child; on a busy machine its wall-clock time says little
FOLDERS: dict[str, dict[str, Any]] = {
    "flash-0731": c.FLASH_0731,
    "flash-preview": c.FLASH_MTP,
    "half": with_(c.FLASH_0731, dspark_markov_rank=DROP),
    "v41-bare": with_(c.V41, text_config=DROP),
    "qwen3": c.QWEN8B_TARGET,
    "qwen3-drafter": c.QWEN8B | {"hidden_size": 4096},
    "qwen3-dflash": c.QWEN8B_DFLASH,
    "other-drafter": c.QWEN8B | {"hidden_size": 2560},
    "fill-in": c.QWEN8B | {"sample_from_anchor": False},
}
LINK = ["--drafter", "unix:/nowhere"]
OWN_DRAFTER = ["--model", "flash-0731", "--draft-model", "flash-0731", *LINK]
E01 = ["flash-0731'", "no MTP head", "`dspark_block_size` = 5", 'method="dspark"', "tokens=5"]
# module, flags (a name of FOLDERS stands for its path), what the one line must say
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "mtp on the target's own path": (
        "verifier_svc",
        ["--model", "flash-0731", "--method", "mtp"],
        E01,
    ),
    "mtp on a named draft path": (
        "verifier_svc",
        [*OWN_DRAFTER, "--method", "mtp"],
        E01,
    ),
    "mtp on plain V4": (
        "verifier_svc",
        ["--model", "flash-preview", "--method", "mtp"],
        ["'mtp' can run on", "drafts only with 'dspark'", "leave out --method"],
    ),
    "dspark on plain V4": (
        "verifier_svc",
        ["--model", "flash-preview", "--method", "dspark"],
        ["plain MTP", "`dspark_target_layer_ids`"],
    ),
    "K below the block": (
        "verifier_svc",
        [*OWN_DRAFTER, "--num-speculative-tokens", "4"],
        ["is 4", "B = 5", "`dspark_block_size`", "lenient"],
    ),
    "incomplete keys": ("verifier_svc", ["--model", "half"], ["missing", "`dspark_markov_rank`"]),
    "V4.1 without its keys": ("verifier_svc", ["--model", "v41-bare"], ["V4.1", "MTP"]),
    "a drafter as the target": ("verifier_svc", ["--model", "qwen3-drafter"], ["--draft-model"]),
    "a drafter for another target": (
        "verifier_svc",
        ["--model", "qwen3", "--draft-model", "other-drafter", *LINK],
        ["hidden size", "2560", "4096"],
    ),
    "drafting without a service": (
        "verifier_svc",
        ["--model", "qwen3", "--draft-model", "qwen3-drafter"],
        ["needs a drafter service", "--drafter ADDRESS"],
    ),
    "serving DFlash": (
        "drafter_svc",
        ["--model", "qwen3-dflash", "--target-model", "qwen3"],
        ["DFlash", "`markov_rank` is 0"],
    ),
    "serving plain MTP": (
        "drafter_svc",
        ["--model", "flash-preview", "--target-model", "flash-preview"],
        ["plain MTP", "`dspark_block_size`"],
    ),
    "serving another target's drafter": (
        "drafter_svc",
        ["--model", "other-drafter", "--target-model", "qwen3"],
        ["hidden size", "2560", "4096"],
    ),
    "serving incomplete keys": (
        "drafter_svc",
        ["--model", "half", "--target-model", "half"],
        ["`dspark_markov_rank`"],
    ),
    "serving fill-in blocks": (
        "drafter_svc",
        ["--model", "fill-in", "--target-model", "qwen3"],
        ["fill-in", "`sample_from_anchor`"],
    ),
    "no such folder": (
        "drafter_svc",
        ["--model", "/no/such", "--target-model", "qwen3"],
        ["/no/such", "cannot be opened"],
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("configs")
    for name, config in FOLDERS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return {name: str(root / name) for name in FOLDERS}


def run(module: str, flags: list[str]) -> tuple[int, float, str]:
    """Exit code, CPU seconds and output of one process, which must end by itself."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--listen", "unix:/no/such/socket", *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # waited for; nothing to reap
        out.seek(0)
        return process.returncode, used.ru_utime + used.ru_stime, out.read().decode()


@pytest.mark.parametrize("case", CASES)
def test_a_refused_config_ends_with_one_line_and_code_2(folders: dict[str, str], case: str) -> None:
    module, flags, fragments = CASES[case]
    code, cpu_s, output = run(module, [folders.get(flag, flag) for flag in flags])
    assert code == 2, output
    assert "Traceback" not in output
    (line,) = output.splitlines()
    assert line.startswith("dspark-verifier: " if module == "verifier_svc" else "dspark-drafter: ")
    for fragment in fragments:
        assert fragment in line
    assert cpu_s < MAX_CPU_S
