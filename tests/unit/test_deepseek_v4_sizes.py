"""What the model asks for at the released sizes adds up to the published files, byte for byte.

Builds both halves on the meta device with a ledger in the place of a checkpoint. Tensor counts and
payload bytes are those of public release records of Flash-0731 and Pro-0813.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.drafter import DeepseekV4DrafterConfig, DSparkV4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.testing import configs

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "type": "yarn",
}
SHARED = {
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "max_position_embeddings": 1048576,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-6,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
}
FLASH: dict[str, Any] = {
    **configs.FLASH_0731,
    **SHARED,
    "index_topk": 512,
    "o_groups": 8,
    "routed_scaling_factor": 1.5,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
}
PRO: dict[str, Any] = {
    **configs.PRO_0813,
    **SHARED,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "index_topk": 1024,
    "o_groups": 16,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0, 0, 0],
}
RELEASES = {
    "flash-0731": (FLASH, (67_612, 156_015_698_140), (4_705, 10_862_838_300)),
    "pro-0813": (PRO, (142_773, 850_748_205_004), (7_009, 41_979_375_900)),
}


class Ledger(DeepseekV4Weights):
    """Counts what is asked for, in the dtypes that released files have; hands out meta tensors."""

    def __init__(self, config: Any) -> None:
        self.config, self.dtype, self.device = config, torch.bfloat16, "meta"
        self.num_tensors = self.num_bytes = 0

    def book(self, num_bytes: int, num_tensors: int = 1) -> None:
        self.num_bytes += num_bytes
        self.num_tensors += num_tensors

    def has(self, name: str, shard: int | None = None) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...], shard: int | None = None) -> Tensor:
        value = torch.empty(shape, device="meta")
        self.book(value.numel() * (2 if name.endswith(".weight") else 4))
        return value

    float32 = tensor

    def ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.zeros(shape, dtype=torch.int64)
        self.book(value.numel() * 8)
        return value

    def matrix(self, name: str, shape: tuple[int, int], shard: int | None = None) -> Tensor:
        rows, cols = shape
        if ".ffn.experts." in name:
            self.book(rows * cols // 2 + rows * cols // 32, 2)
        elif name.endswith(".weights_proj"):
            self.book(rows * cols * 2)
        else:
            self.book(rows * cols + -(-rows // 128) * -(-cols // 128), 2)
        return torch.empty(shape, device="meta")

    def linear(self, cols: int, *parts: tuple[str, int | None, int]) -> Any:
        for name, shard, rows in parts:
            self.matrix(name, (rows, cols), shard)


@pytest.mark.parametrize("release", RELEASES)
def test_both_halves_add_up_to_the_release(release: str) -> None:
    raw, base, drafter = RELEASES[release]
    config = deepseek_v4_config(Path(release), raw)
    ledger = Ledger(config)
    DeepseekV4Target(config, ledger)
    assert (ledger.num_tensors, ledger.num_bytes) == base
    ledger, taps = Ledger(config), tuple(raw["dspark_target_layer_ids"])
    DSparkV4(DeepseekV4DrafterConfig(config, 3, 5, taps, 128799, raw["dspark_markov_rank"]), ledger)
    embedding_and_head = 2 * config.vocab_size * config.hidden_size * 2
    assert (ledger.num_tensors - 2, ledger.num_bytes - embedding_and_head) == drafter
