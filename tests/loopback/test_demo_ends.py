"""However the demo is ended, its two services end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-P", "-m", "common.cli.main", "demo", "--family", "deepseek-v4"]


def children(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # gone meanwhile
            continue
        if int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_ending_the_demo_ends_its_services(number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--max-tokens", "2000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while len(services := children(demo.pid)) < 2:
            assert demo.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        demo.send_signal(number)
        assert demo.wait(30) != 0
    finally:
        demo.kill()
    assert not [pid for pid in services if os.path.exists(f"/proc/{pid}")]
