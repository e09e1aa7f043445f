"""common/cores.py: a process stays on the cores that it was given."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cores import parse_cores, show_cores, two_shares, use_cores
from common.errors import StartupError

ALLOWED = sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_shown_cores_are_read_back(cores: set[int]) -> None:
    assert parse_cores(show_cores(cores)) == cores


def test_ranges_and_lists() -> None:
    assert parse_cores("0, 4-6,2") == {0, 2, 4, 5, 6}
    assert show_cores({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "3-1", "0,,1", "-1", "1.5", "0-99999999", "9" * 5000]
)
def test_what_names_no_cores_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--cores"):
        parse_cores(text)


def test_shares_are_halves_of_whole_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6})
    monkeypatch.setattr("common.cores._siblings", lambda core: frozenset({core % 4, core % 4 + 4}))
    assert two_shares() == ("0,4", "1-2,5-6")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 7})  # one core, two threads
    assert two_shares() == (None, None)
    monkeypatch.setattr("common.cores._siblings", lambda core: frozenset({core}))
    assert two_shares() == ("3", "7")


def test_cores_that_are_not_there_are_refused_by_what_is() -> None:
    with pytest.raises(StartupError, match=f"may use {show_cores(set(ALLOWED))};"):
        use_cores(str(max(ALLOWED) + 1))


def test_threads_started_later_stay_there_too() -> None:
    code = (
        f"import os, threading; from common.cores import use_cores; use_cores('{ALLOWED[-1]}');"
        "thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0)));"
        "thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{{{ALLOWED[-1]}}}"
