"""From a draft checkpoint folder to a drafter: a mapping from architecture string to family.

A drafter is read beside its target's folder: a stand-alone one takes from it what it shares; one
that lives inside its target's checkpoint is that folder, or a copy of it with the drafter's shards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.errors import LoadError, StartupError
from common.loading.safetensors_files import LoadReport, read_json
from common.models import dspark_qwen3
from common.models.deepseek_v4 import drafter as deepseek_v4
from common.models.deepseek_v4 import shards
from common.models.interfaces import DrafterFacts, DraftModel, Projection
from common.models.ranks import LeadingDrafter
from common.models.registry import read_target_config
from common.parallel import ALONE, Parallel

Device = torch.device | str


@dataclass(frozen=True)
class DrafterFamily:
    """The first three take the draft folder and the target's; `read_config` reads no weight.

    `check_ranks`, of a config, the folder's name and more than one rank, raises StartupError.
    """

    read_config: Callable[[Path, Path], DrafterFacts]
    load: Callable[[Path, Path, torch.dtype, Device, Parallel], tuple[DraftModel, LoadReport]]
    load_projector: Callable[[Path, Path, torch.dtype, Device], Projection]
    check_ranks: Callable[[Any, str, int], None]


def _in_one_process(config: DrafterFacts, name: str, num_ranks: int) -> None:
    raise StartupError(
        f"{name} cannot be split over {num_ranks} ranks: {config.family} drafters run in one "
        "process, only DeepSeek-V4's is split; start it without torchrun"
    )


DRAFTERS = {
    dspark_qwen3.ARCHITECTURE: DrafterFamily(
        lambda path, target: dspark_qwen3.drafter_config(path, read_target_config(target)),
        lambda path, target, dtype, device, _: dspark_qwen3.load_drafter(
            path, target, dtype, device
        ),
        dspark_qwen3.load_projector,
        _in_one_process,
    ),
    "DeepseekV4ForCausalLM": DrafterFamily(
        deepseek_v4.drafter_config,
        lambda path, target, dtype, device, parallel: deepseek_v4.load_deepseek_v4_drafter(
            path, dtype, device, target, parallel
        ),
        lambda path, target, dtype, device: deepseek_v4.load_deepseek_v4_projector(
            path, dtype, device, target
        ),
        lambda config, name, num_ranks: shards.check_ranks(config.model, name, num_ranks),
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


def check_ranks(path: Path, target_path: Path, num_ranks: int) -> None:
    """Raises StartupError if the drafter cannot be split over so many ranks; reads no weight."""
    if num_ranks > 1:
        family = _family(path)
        family.check_ranks(family.read_config(path, target_path), str(path), num_ranks)


def load_drafter(
    path: Path,
    target_path: Path,
    dtype: torch.dtype,
    device: Device,
    parallel: Parallel = ALONE,
) -> tuple[DraftModel, LoadReport]:
    """The drafter with all that it shares with its target. Raises LoadError.

    With several ranks, all of which call this: this rank's slices. What rank 0 gets has the others,
    which must `follow_drafter`, compute with it.
    """
    check_ranks(path, target_path, parallel.size)
    model, report = _family(path).load(path, target_path, dtype, device, parallel)
    if parallel.size > 1:
        report = replace(report, peak_bytes_of_ranks=parallel.gather(report.peak_bytes))
        if parallel.rank == 0:
            model = LeadingDrafter(model, parallel)
    return model, report


def load_projector(path: Path, target_path: Path, dtype: torch.dtype, device: Device) -> Projection:
    """What turns taps into PROJECTED rows, alone. Raises LoadError."""
    return _family(path).load_projector(path, target_path, dtype, device)
