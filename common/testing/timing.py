"""Timing for benchmarks: cases run in turn, so that a noisy machine disturbs all of them alike.

A number counts only beside another one from the same run. Knows nothing of what it times.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Case = Callable[[], object]


def interleaved(
    cases: Mapping[str, Case], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each case, `repeats` of each, after one untimed round: A B C, A B C, ...

    clock: `time.thread_time` leaves out the time in which other processes had the core.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(repeats + 1):
        for name, case in cases.items():
            started = clock()
            case()
            if round_index:
                seconds[name].append(clock() - started)
    return seconds


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median over rounds of slow / fast of the same round: how many times faster `fast` is."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def machine() -> str:
    """Processor model and number of cores, for the head of a report."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = f"{names[0]} x{len(names)}" if names else cpu
    return cpu
