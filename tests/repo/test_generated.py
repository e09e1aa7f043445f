"""The checked-in stubs match proto/, and the packages that answer are this tree's."""

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_match_the_protos() -> None:
    check = [sys.executable, str(ROOT / "proto/generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_common_is_ours() -> None:
    for name in ("common.errors", "verifier_svc.request", "drafter_svc.training"):
        file = importlib.import_module(name).__file__
        assert file is not None and Path(file).is_relative_to(ROOT), file
