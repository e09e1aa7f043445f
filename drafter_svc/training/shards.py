"""Shard files between generation and training: texts with the target's inner states.

Each shard is a safetensors file, complete when it has its name. Flat over its texts' tokens:
`ids` int32 [N], `states` bf16 [N, (m + 1) * d] (taps in order, then the last hidden row after the
final norm), `lse` float32 [N] (log of the sum of exp of the target's full logits; 0 inside the
prompt). Per text: `starts` int64 [n + 1], `prompt_lens`, `prompt_index`, `greedy` int64 [n]. A
text's last token was sampled but never run: its states are zero.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Text:
    """One answered prompt. ids [n], states [n, (m + 1) * d], lse [n]."""

    ids: torch.Tensor
    states: torch.Tensor
    lse: torch.Tensor
    prompt_len: int
    prompt_index: int
    greedy: bool


def write_shard(folder: Path, number: int, texts: list[Text], meta: dict[str, Any]) -> Path:
    """Writes texts as shard `number` under a temporary name, then renames it."""
    lengths = torch.tensor([0] + [len(text.ids) for text in texts])
    tensors = {
        "ids": torch.cat([text.ids for text in texts]).to(torch.int32),
        "states": torch.cat([text.states for text in texts]),
        "lse": torch.cat([text.lse for text in texts]),
        "starts": lengths.cumsum(0),
        "prompt_lens": torch.tensor([text.prompt_len for text in texts]),
        "prompt_index": torch.tensor([text.prompt_index for text in texts]),
        "greedy": torch.tensor([int(text.greedy) for text in texts]),
    }
    path = folder / f"shard-{number:05d}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"format": "pt", "meta": json.dumps(meta)})
    os.replace(partial, path)
    return path


def list_shards(folder: Path) -> list[Path]:
    """Complete shards in the order they were written."""
    return sorted(folder.glob("shard-*.safetensors"))


def num_answer_tokens(folder: Path) -> int:
    """Answer tokens in all complete shards."""
    total = 0
    for path in list_shards(folder):
        with safe_open(path, "pt") as shard:
            total += int(shard.get_tensor("starts")[-1] - shard.get_tensor("prompt_lens").sum())
    return total


def read_meta(path: Path) -> dict[str, Any]:
    """What the generator noted: taps, hidden_size, next_prompt, target."""
    with safe_open(path, "pt") as shard:
        meta: dict[str, Any] = json.loads(shard.metadata()["meta"])
    return meta


def read_shard(path: Path) -> list[Text]:
    """All texts of a shard; their tensors are views of one copy in memory."""
    with safe_open(path, "pt") as shard:
        get = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    texts = []
    for i, (low, high) in enumerate(zip(get["starts"][:-1], get["starts"][1:], strict=True)):
        texts.append(
            Text(
                get["ids"][low:high].long(),
                get["states"][low:high],
                get["lse"][low:high],
                int(get["prompt_lens"][i]),
                int(get["prompt_index"][i]),
                bool(get["greedy"][i]),
            )
        )
    return texts
