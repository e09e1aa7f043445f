"""common/huge_pages.py: large memory is moved, its contents stay, and time bounds the move."""

import re
from pathlib import Path

import numpy as np
import pytest

from common.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOWED = SETTING.exists() and "[never]" not in SETTING.read_text()
NUM_BYTES = 64 << 20


def huge_bytes() -> int:
    """Of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"AnonHugePages:\s+(\d+) kB", rollup)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not ALLOWED, reason="this kernel has no huge pages to give")
def test_large_memory_is_moved_and_stays_what_it_was() -> None:
    values = np.arange(NUM_BYTES // 8)
    before = huge_bytes()
    moved = use_huge_pages()
    assert moved >= NUM_BYTES - (4 << 20)
    assert huge_bytes() - before >= NUM_BYTES // 2
    assert (values == np.arange(NUM_BYTES // 8)).all()


def test_no_time_moves_nothing() -> None:
    held = np.ones(NUM_BYTES // 8)
    assert use_huge_pages(0.0) == 0 and held.all()
