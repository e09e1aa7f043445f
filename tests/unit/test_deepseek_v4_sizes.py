"""What the model asks for at the released sizes adds up to the published files, byte for byte.

Builds both halves on the meta device with a ledger in the place of a checkpoint. Tensor counts and
payload bytes are those of public release records of Flash-0731 and Pro-0813. Split over ranks, what
all of them ask for is the file again, and what they have in common once per rank.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.models.deepseek_v4.config import deepseek_v4_config
from common.models.deepseek_v4.drafter import DeepseekV4DrafterConfig, DSparkV4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.deepseek_v4.shards import Shards
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.parallel import Parallel
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


PRO_CONFIG = deepseek_v4_config(Path("pro"), PRO)


class Ledger(DeepseekV4Weights):
    """Counts what is asked for, in the dtypes that released files have; hands out meta tensors."""

    def __init__(self, config: Any, rank: int = 0, num_ranks: int = 1) -> None:
        self.config, self.dtype, self.device = config, torch.bfloat16, "meta"
        self.shards = Shards(config, Parallel(rank, num_ranks))
        self.num_tensors = self.num_bytes = self.num_split_bytes = 0

    def book(self, num_bytes: int, num_tensors: int = 1) -> None:
        self.num_bytes += num_bytes
        self.num_tensors += num_tensors

    def has(self, name: str, shard: int | None = None) -> bool:
        return True

    def leave(self, name: str, shard: int | None = None) -> None:
        pass

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.empty(shape, device="meta")
        self.book(value.numel() * (2 if name.endswith(".weight") else 4))
        return value

    def float32(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Tensor:
        before = self.num_bytes
        value = self.tensor(name, shape if rows is None else (len(rows), *shape[1:]))
        self.num_split_bytes += 0 if rows is None else self.num_bytes - before
        return value

    def ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.zeros(shape, dtype=torch.int64)
        self.book(value.numel() * 8)
        return value

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        shard: int | None = None,
        only_rows: range | None = None,
        only_cols: range | None = None,
    ) -> Tensor:
        before = self.num_bytes
        rows, cols = (
            size if only is None else len(only)
            for size, only in zip(shape, (only_rows, only_cols), strict=True)
        )
        if ".ffn.experts." in name:
            self.book(rows * cols // 2 + rows * cols // 32, 2)
        elif name.endswith(".weights_proj"):
            self.book(rows * cols * 2)
        else:
            self.book(rows * cols + -(-rows // 128) * -(-cols // 128), 2)
        if only_rows or only_cols or ".ffn.experts." in name:
            self.num_split_bytes += self.num_bytes - before
        return torch.empty((rows, cols), device="meta")

    def linear(
        self,
        cols: int,
        *parts: tuple[str, int | None, int],
        only_rows: range | None = None,
        only_cols: range | None = None,
    ) -> Any:
        for name, shard, rows in parts:
            self.matrix(name, (rows, cols), shard, only_rows, only_cols)


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


@pytest.mark.parametrize(("release", "num_ranks"), [("flash-0731", 8), ("pro-0813", 16)])
def test_what_the_ranks_split_adds_up_to_the_whole(release: str, num_ranks: int) -> None:
    """Pro has 24 blocks in its shared expert: of 16 ranks 12 hold two of them, 4 none."""
    config = deepseek_v4_config(Path(release), RELEASES[release][0])

    def ledger(rank: int, num_ranks: int) -> Ledger:
        made = Ledger(config, rank, num_ranks)
        DeepseekV4Target(config, made)
        return made

    whole, ranks = ledger(0, 1), [ledger(rank, num_ranks) for rank in range(num_ranks)]
    assert sum(rank.num_split_bytes for rank in ranks) == whole.num_split_bytes
    # Nearly all is split, so a rank holds little more than its share.
    assert whole.num_split_bytes > 0.97 * whole.num_bytes
    assert max(rank.num_bytes for rank in ranks) < whole.num_bytes / num_ranks * 1.4
    head = config.vocab_size * config.hidden_size * 2
    assert ranks[0].num_bytes - ranks[0].num_split_bytes == (
        ranks[-1].num_bytes - ranks[-1].num_split_bytes + head
    )
    channels = [len(rank.shards.shared_channels) for rank in ranks]
    assert channels == ([256] * 8 if num_ranks == 8 else [256] * 12 + [0] * 4)


@given(
    num_experts=st.integers(1, 40),
    channels=st.integers(1, 4000),
    block=st.sampled_from([1, 16, 128]),
    num_ranks=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=100, deadline=None)
def test_every_number_belongs_to_one_rank(
    num_experts: int, channels: int, block: int, num_ranks: int
) -> None:
    config = replace(
        PRO_CONFIG,
        num_experts=num_experts,
        moe_intermediate_size=channels,
        weight_block=(block, block),
    )
    ranks = [Shards(config, Parallel(rank, num_ranks)) for rank in range(num_ranks)]
    for of, count in (
        (lambda own: own.heads, config.num_heads),
        (lambda own: own.experts, num_experts),
        (lambda own: own.shared_channels, channels),
        (lambda own: own.head_rows, config.num_heads * config.head_dim),
        (lambda own: own.group_rows, config.o_groups * config.o_lora_rank),
    ):
        assert [number for own in ranks for number in of(own)] == list(range(count))
    # Whole blocks each, and no rank has more than one expert more than another.
    assert all(own.shared_channels.start % block == 0 for own in ranks if own.shared_channels)
    assert max(len(own.experts) for own in ranks) - min(len(own.experts) for own in ranks) <= 1
