"""`dspark detect` needs the standard library only and answers at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.testing import configs as c

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
start = time.process_time()
from common.cli.main import main
code = main(["detect", sys.argv[1], "--tp", "16"])
seconds = time.process_time() - start
allowed = {"common"} | set(sys.stdlib_module_names) | {"__main__"}
print(code, seconds, sorted({name.split(".")[0] for name in sys.modules} - allowed))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A config and an index with as many tensors as the real Flash release."""
    names = [f"layers.{i // 1600}.ffn.experts.{i % 1600}.w1.weight" for i in range(67_612)]
    names += [f"mtp.{s}.ffn.experts.{e}.w1.{k}" for s in range(3) for e in range(780) for k in "ab"]
    index = c.index_of(*names, *c.DSPARK_NAMES)
    (tmp_path / "config.json").write_text(json.dumps(c.FLASH_0731))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_detect_imports_nothing_heavy_and_is_quick(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT, str(checkpoint)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    code, seconds, others = done.stdout.splitlines()[-1].split(" ", 2)
    assert code == "0"
    assert others == "[]", f"not in the standard library: {others}"
    assert float(seconds) < 0.3


def test_detection_never_imports_upwards_or_sideways() -> None:
    """The package is a leaf: errors are all it takes from the rest of the project."""
    for path in (ROOT / "common/detect").glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("from common", "import common")):
                assert line.startswith(("from common.detect", "from common.errors")), path
