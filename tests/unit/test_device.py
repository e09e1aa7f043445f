"""How far memory rose, of a process that allocates a known amount."""

import subprocess
import sys

CODE = """
import torch
from common.device import PeakMemory
before = PeakMemory("cpu")
rows = torch.ones(50 << 20)
del rows
after = PeakMemory("cpu")
torch.ones(10 << 20)
print(before.num_bytes(), after.num_bytes())
"""


def test_peak_memory_is_what_was_held_at_most() -> None:
    """200 MiB, less what starting took for a while; 40 MiB later on do not reach that again. What
    the starting process holds is none of it.
    """
    held = b"1" * (300 << 20)
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    del held
    first, second = (int(number) / 2**20 for number in done.stdout.split())
    assert 150 < first < 240 and second < 5
