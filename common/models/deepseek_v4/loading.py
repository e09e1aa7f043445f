"""From a checkpoint folder to a DeepSeek-V4 target. Reads nothing of what lies under `mtp.*`."""

from pathlib import Path

import torch

from common.loading.safetensors_files import LoadReport, read_json
from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.models.interfaces import Numerics
from common.parallel import ALONE, Parallel


def load_deepseek_v4(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    numerics: Numerics = "fast",
    parallel: Parallel = ALONE,
) -> tuple[DeepseekV4Target, LoadReport]:
    """Reads config.json and the base's tensors, of them this rank's slices, dequantised to `dtype`.

    LoadError for a tensor or scale that is missing, left over or misshapen.
    """
    path = Path(path)
    config = deepseek_v4_config(path, read_json(path / "config.json"))
    weights = DeepseekV4Weights(path, config, "target", dtype, device, parallel)
    with torch.inference_mode():
        model = DeepseekV4Target(config, weights, numerics)
    return model, weights.finish()
