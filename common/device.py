"""The device that a setting names, checked before anything is loaded onto it. Knows no model."""

import re
from pathlib import Path

import torch

from common.errors import StartupError


def device_of(name: str, local_rank: int | None = None) -> torch.device:
    """The device of `--device name`. Raises StartupError if torch does not know or have it.

    local_rank: of this process among those that share the machine's devices and the work, each of
    which takes the CUDA device of that number; None when it works alone.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise StartupError(f"--device {name!r} is unknown; use cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise StartupError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    if local_rank is None:
        return device
    if device.index is not None:
        raise StartupError(
            f"--device {name} names one device for all ranks; use --device cuda, and each rank "
            "takes the device of its number"
        )
    if local_rank >= torch.cuda.device_count():
        raise StartupError(
            f"local rank {local_rank} has no device: {torch.cuda.device_count()} are visible; "
            "lower --nproc-per-node or make more visible"
        )
    return torch.device("cuda", local_rank)


class PeakMemory:
    """How far memory rose since this was made.

    On CUDA what torch allocated on the device. Elsewhere the resident memory of the process, pages
    of mapped files that were read included, above the most that it ever had before: of a process
    that just started.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._peak()

    def num_bytes(self) -> int:
        """Growth until now."""
        return self._peak() - self._before

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # Not ru_maxrss, which a process has from the one that started it.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s*(\d+) kB", status)  # not every sandbox tells
        return int(found[1]) << 10 if found else 0
