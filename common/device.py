"""The device that a setting names, checked before anything is loaded onto it. Knows no model."""

import torch

from common.errors import StartupError


def device_of(name: str) -> torch.device:
    """The device of `--device name`. Raises StartupError if torch does not know or have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise StartupError(f"--device {name!r} is unknown; use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    return device
