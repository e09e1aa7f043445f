"""From a checkpoint folder to a target: a mapping from architecture string to family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import LoadError
from common.loading.safetensors_files import Checkpoint, LoadReport, read_json
from common.models.config import TargetConfig, target_config
from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.dense import DenseTarget
from common.models.interfaces import Numerics, Target, TargetFacts
from common.models.llama import LlamaTarget
from common.models.qwen3 import Qwen3Target

Device = torch.device | str


@dataclass(frozen=True)
class TargetFamily:
    """How to read a folder's parsed config.json, and how to load the folder."""

    read_config: Callable[[Path, Mapping[str, Any]], TargetFacts]
    load: Callable[[Path, torch.dtype, Device, Numerics], tuple[Target, LoadReport]]


def _dense(model: type[DenseTarget]) -> TargetFamily:
    def read_config(path: Path, raw: Mapping[str, Any]) -> TargetConfig:
        return target_config(path, model.family, raw, model.qk_norm)

    def load(
        path: Path, dtype: torch.dtype, device: Device, numerics: Numerics
    ) -> tuple[Target, LoadReport]:
        weights = Checkpoint(path, dtype, device)
        with torch.inference_mode():
            config = read_config(path, read_json(path / "config.json"))
            target = model(config, weights, numerics)
        return target, weights.finish()

    return TargetFamily(read_config, load)


TARGETS = {
    "LlamaForCausalLM": _dense(LlamaTarget),
    "Qwen3ForCausalLM": _dense(Qwen3Target),
    "DeepseekV4ForCausalLM": TargetFamily(deepseek_v4_config, load_deepseek_v4),
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


def load_target(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: Device = "cpu",
    numerics: Numerics = "fast",
) -> tuple[Target, LoadReport]:
    """Reads config.json and every tensor. LoadError for anything missing, left over or unbuilt."""
    path = Path(path)
    family, _ = _read(path)  # a config that cannot work is refused before a weight file is opened
    return family.load(path, dtype, device, numerics)
