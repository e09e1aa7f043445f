"""Keeps a process on some of the machine's CPU cores. Knows no service.

Two services that wake each other several times a round want a core each: where the kernel may move
them, each wake-up costs about twice as much, and they take each other's caches.
"""

import os
import re
from pathlib import Path

from common.errors import StartupError

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def use_cores(text: str | None) -> None:
    """Runs this thread, and all that it starts, on the cores that `--cores` names; None: any.

    Raises StartupError for text that names none, or cores that this process may not use.
    """
    if text is None:
        return
    wanted = parse_cores(text)
    if not hasattr(os, "sched_setaffinity"):
        raise StartupError(f"--cores {text}: only Linux can do that; leave it out")
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise StartupError(
            f"--cores {text}: this process may use {show_cores(allowed)}; name some of these or "
            "leave it out"
        )
    os.sched_setaffinity(0, wanted)


def parse_cores(text: str) -> frozenset[int]:
    """ "0", "2-5" or "0,4-7" -> core numbers. Raises StartupError."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < 1 << 16:
            raise StartupError(f"--cores {text!r}: {part!r} is no core; write 0 or 2-5 or 0,4-7")
        cores.update(range(first, last + 1))
    return frozenset(cores)


def two_shares() -> tuple[str | None, str | None]:
    """`--cores` of two services that share this machine: half of what this process may use each.

    Threads of one physical core go to one of the two. None if there are not two cores to share.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    physical = sorted({min(_siblings(core) & allowed) for core in allowed})
    half = len(physical) // 2
    if not half:
        return None, None
    shares = [set[int]().union(*map(_siblings, p)) for p in (physical[:half], physical[half:])]
    return show_cores(shares[0] & allowed), show_cores(shares[1] & allowed)


def _siblings(core: int) -> frozenset[int]:
    """The cores that are threads of the same physical one, `core` among them."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return parse_cores(path.read_text().strip()) if path.exists() else frozenset({core})


def show_cores(cores: frozenset[int] | set[int]) -> str:
    """The shortest text that `parse_cores` reads as these."""
    ordered, parts = sorted(cores), list[str]()
    for core in ordered:
        if core - 1 not in cores:
            last = core
            while last + 1 in cores:
                last += 1
            parts.append(str(core) if core == last else f"{core}-{last}")
    return ",".join(parts)
