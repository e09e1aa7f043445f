"""From a draft checkpoint folder to a drafter: a mapping from architecture string to family.

A drafter is read beside its target's folder: a stand-alone one takes from it what it shares; one
that lives inside its target's checkpoint is that folder, or a copy of it with the drafter's shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import LoadError
from common.loading.safetensors_files import LoadReport, read_json
from common.models import dspark_qwen3
from common.models.deepseek_v4 import drafter as deepseek_v4
from common.models.interfaces import DrafterFacts, DraftModel, Projection
from common.models.registry import read_target_config

Device = torch.device | str


@dataclass(frozen=True)
class DrafterFamily:
    """All three take the draft folder and the target's; `read_config` reads no weight."""

    read_config: Callable[[Path, Path], DrafterFacts]
    load: Callable[[Path, Path, torch.dtype, Device], tuple[DraftModel, LoadReport]]
    load_projector: Callable[[Path, Path, torch.dtype, Device], Projection]


DRAFTERS = {
    dspark_qwen3.ARCHITECTURE: DrafterFamily(
        lambda path, target: dspark_qwen3.drafter_config(path, read_target_config(target)),
        dspark_qwen3.load_drafter,
        dspark_qwen3.load_projector,
    ),
    "DeepseekV4ForCausalLM": DrafterFamily(
        deepseek_v4.drafter_config,
        lambda path, target, dtype, device: deepseek_v4.load_deepseek_v4_drafter(
            path, dtype, device, target
        ),
        lambda path, target, dtype, device: deepseek_v4.load_deepseek_v4_projector(
            path, dtype, device, target
        ),
    ),
}


def _family(path: Path) -> DrafterFamily:
    architecture = (read_json(path / "config.json").get("architectures") or [None])[0]
    family = DRAFTERS.get(architecture)
    if family is None:
        raise LoadError(
            f"{path / 'config.json'}: architecture {architecture!r} is not a known drafter; "
            f"known: {', '.join(DRAFTERS)}"
        )
    return family


def read_drafter_config(path: Path, target_path: Path) -> DrafterFacts:
    """A drafter's config, checked against its target's; reads no weight. Raises LoadError."""
    return _family(path).read_config(path, target_path)


def load_drafter(
    path: Path, target_path: Path, dtype: torch.dtype, device: Device
) -> tuple[DraftModel, LoadReport]:
    """The drafter with all that it shares with its target. Raises LoadError."""
    return _family(path).load(path, target_path, dtype, device)


def load_projector(path: Path, target_path: Path, dtype: torch.dtype, device: Device) -> Projection:
    """What turns taps into PROJECTED rows, alone. Raises LoadError."""
    return _family(path).load_projector(path, target_path, dtype, device)
