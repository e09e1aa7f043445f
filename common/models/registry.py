"""From a checkpoint folder to a model: a mapping from architecture string to class."""

from pathlib import Path

import torch

from common.errors import LoadError
from common.loading.safetensors_files import Checkpoint, LoadReport, read_json
from common.models.config import TargetConfig, target_config
from common.models.dense import DenseTarget, Numerics
from common.models.llama import LlamaTarget
from common.models.qwen3 import Qwen3Target

TARGETS: dict[str, type[DenseTarget]] = {
    "LlamaForCausalLM": LlamaTarget,
    "Qwen3ForCausalLM": Qwen3Target,
}


def _family(path: Path) -> tuple[type[DenseTarget], TargetConfig]:
    raw = read_json(path / "config.json")
    architecture = (raw.get("architectures") or [None])[0]
    family = TARGETS.get(architecture)
    if family is None:
        raise LoadError(
            f"{path / 'config.json'}: architecture {architecture!r} is not a known target; "
            f"known: {', '.join(TARGETS)}"
        )
    return family, target_config(path, family.family, raw, family.qk_norm)


def read_target_config(path: Path) -> TargetConfig:
    """A target's config alone; reads no weight. Raises LoadError."""
    return _family(path)[1]


def load_target(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    numerics: Numerics = "fast",
) -> tuple[DenseTarget, LoadReport]:
    """Reads config.json and every tensor. LoadError for anything missing, left over or unbuilt."""
    path = Path(path)
    family, config = _family(path)
    weights = Checkpoint(path, dtype, device)
    with torch.inference_mode():
        model = family(config, weights, numerics)
    return model, weights.finish()
