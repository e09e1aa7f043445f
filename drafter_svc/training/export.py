"""Writes a trained drafter as a DeepSpec folder: config.json and model.safetensors in bf16."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter_svc.training.model import Drafter


def export(drafter: Drafter, folder: Path) -> Path:
    """Writes `folder`; the embedding is the target's and is not repeated.

    d2t is written as speculators writes it, int64: target id = draft id + d2t[draft id].
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    }
    tensors["d2t"] = drafter.d2t - torch.arange(len(drafter.d2t))
    save_file(tensors, folder / "model.safetensors.partial", {"format": "pt"})
    (folder / "model.safetensors.partial").chmod(0o644)  # safetensors writes for the owner only
    os.replace(folder / "model.safetensors.partial", folder / "model.safetensors")
    config = json.dumps(drafter.config.as_checkpoint(), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder
