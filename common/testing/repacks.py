"""Copies of tiny DeepSeek-V4 checkpoints with changed tensors, such as repackaged experts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.loading.block_quant import MXFP4_GROUP, NVFP4_GROUP, mxfp4_weight
from common.testing.block_quant import quantise_fp8

Tensors = dict[str, Tensor]


def rewritten(folder: Path, to: Path, edit: Callable[[Tensors], object], **config: Any) -> Path:
    """Writes a copy with edited tensors, in one file, and config keys set; returns its folder."""
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    edit(tensors)
    raw = json.loads((folder / "config.json").read_text()) | config
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text(json.dumps(raw))
    save_file(tensors, to / "model.safetensors")
    return to


def repack_fp8(tensors: Tensors) -> None:
    """Expert weights as fp8 with a scale per 128 x 128 block; config: expert_dtype "fp8"."""
    for name in [n for n in tensors if ".ffn.experts." in n and n.endswith(".weight")]:
        scale = name.removesuffix("weight") + "scale"
        weight = mxfp4_weight(name, tensors[name], tensors[scale]).dequantised()
        tensors[name], tensors[scale] = quantise_fp8(weight, (128, 128))


def repack_nvfp4(tensors: Tensors) -> None:
    """Base experts as NVFP4, as public repacks do without loss; those under `mtp.*` stay MXFP4."""
    for name in [n for n in tensors if n.startswith("layers.") and ".ffn.experts." in n]:
        if not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        scales = tensors.pop(f"{module}.scale").float()
        scale_2 = 2.0 ** (scales.max().log2().floor() - 8)
        pairs = (scales / scale_2).repeat_interleave(MXFP4_GROUP // NVFP4_GROUP, 1)
        tensors[name] = tensors[name].view(torch.uint8)
        tensors[f"{module}.weight_scale"] = pairs.to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale_2"] = scale_2
        tensors[f"{module}.input_scale"] = torch.tensor(0.25)
