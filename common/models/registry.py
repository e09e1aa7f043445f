"""From a checkpoint folder to a target: a mapping from architecture string to family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.errors import LoadError, StartupError
from common.loading.safetensors_files import Checkpoint, LoadReport, read_json
from common.models.config import TargetConfig, target_config
from common.models.deepseek_v4 import shards as deepseek_v4
from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.dense import DenseTarget
from common.models.interfaces import Numerics, Target, TargetFacts
from common.models.invariance import check_invariance
from common.models.llama import LlamaTarget
from common.models.qwen3 import Qwen3Target
from common.models.ranks import LeadingTarget
from common.parallel import ALONE, Parallel

Device = torch.device | str


@dataclass(frozen=True)
class TargetFamily:
    """How to read a folder's parsed config.json, how to load the folder, and on how many ranks.

    `check_ranks`, of a config, the folder's name and more than one rank, raises StartupError.
    """

    read_config: Callable[[Path, Mapping[str, Any]], TargetFacts]
    load: Callable[[Path, torch.dtype, Device, Numerics, Parallel], tuple[Target, LoadReport]]
    check_ranks: Callable[[Any, str, int], None]


def _dense(model: type[DenseTarget]) -> TargetFamily:
    def read_config(path: Path, raw: Mapping[str, Any]) -> TargetConfig:
        return target_config(path, model.family, raw, model.qk_norm)

    def load(
        path: Path, dtype: torch.dtype, device: Device, numerics: Numerics, parallel: Parallel
    ) -> tuple[Target, LoadReport]:
        assert parallel.size == 1, "see check_ranks"
        weights = Checkpoint(path, dtype, device)
        with torch.inference_mode():
            config = read_config(path, read_json(path / "config.json"))
            target = model(config, weights, numerics)
        return target, weights.finish()

    def check_ranks(config: TargetConfig, name: str, num_ranks: int) -> None:
        raise StartupError(
            f"{name} cannot be split over {num_ranks} ranks: {config.family} targets run in one "
            "process, only DeepSeek-V4 is split; start it without torchrun"
        )

    return TargetFamily(read_config, load, check_ranks)


TARGETS = {
    "LlamaForCausalLM": _dense(LlamaTarget),
    "Qwen3ForCausalLM": _dense(Qwen3Target),
    "DeepseekV4ForCausalLM": TargetFamily(
        deepseek_v4_config, load_deepseek_v4, deepseek_v4.check_ranks
    ),
}


def _read(path: Path) -> tuple[TargetFamily, TargetFacts]:
    raw = read_json(path / "config.json")
    architecture = (raw.get("architectures") or [None])[0]
    family = TARGETS.get(architecture)
    if family is None:
        raise LoadError(
            f"{path / 'config.json'}: architecture {architecture!r} is not a known target; "
            f"known: {', '.join(TARGETS)}"
        )
    return family, family.read_config(path, raw)


def read_target_config(path: Path) -> TargetFacts:
    """A target's config alone; reads no weight. Raises LoadError."""
    return _read(path)[1]


def check_ranks(path: Path, num_ranks: int) -> None:
    """Raises StartupError if the target cannot be split over so many ranks; reads no weight."""
    family, config = _read(path)
    if num_ranks > 1:
        family.check_ranks(config, str(path), num_ranks)


def load_target(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
    numerics: Numerics = "fast",
    parallel: Parallel = ALONE,
) -> tuple[Target, LoadReport]:
    """Reads config.json and every tensor. LoadError for anything missing, left over or unbuilt.

    With several ranks, all of which call this: this rank's slices. What rank 0 gets has the others,
    which must `follow_target`, compute with it. StartupError where batch-invariant numerics cannot
    be kept.
    """
    path = Path(path)
    # What cannot work is refused before a weight file is opened.
    check_ranks(path, parallel.size)
    family, _ = _read(path)
    model, report = family.load(path, dtype, device, numerics, parallel)
    if parallel.size > 1:
        report = replace(report, peak_bytes_of_ranks=parallel.gather(report.peak_bytes))
    if numerics == "batch_invariant":
        check_invariance(model, dtype, has_head=parallel.rank == 0)
    if parallel.size > 1 and parallel.rank == 0:
        model = LeadingTarget(model, parallel)
    return model, report
