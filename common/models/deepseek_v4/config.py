"""A DeepSeek-V4 config.json, reduced to what is computed, refused where it asks for more.

Keys are those of the released Flash and Pro files. `compress_rate_csa` and `compress_rate_hca`,
which transformers also reads, replace the rates 4 and 128 behind `compress_ratios`. Reads no
weight; which drafter a checkpoint carries is `common.detect`'s business.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import LoadError
from common.models.config import eos_token_ids, positive, positive_number
from common.nn.rope import RopeConfig, rope_config

CSA_RATIO, HCA_RATIO = 4, 128  # how compress_ratios names the two kinds of compressed layers
_RATE_KEYS = {CSA_RATIO: "compress_rate_csa", HCA_RATIO: "compress_rate_hca"}
# Keys whose other values would change the numbers. All released files have exactly these.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Compression:
    """How a layer condenses its past: one entry per `rate` tokens."""

    rate: int
    overlap: bool  # CSA: an entry also pools the group before, and an indexer picks entries

    @property
    def span(self) -> int:
        """Tokens that one entry pools."""
        return 2 * self.rate if self.overlap else self.rate


@dataclass(frozen=True)
class DeepseekV4Config:
    """Sizes of the model; of its drafter stages too, which are layers without compression."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # keys, the query's own included
    compressions: tuple[Compression | None, ...]  # per layer; None: the window alone
    index_num_heads: int
    index_head_dim: int
    index_topk: int  # entries that a CSA row attends to at most
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    num_hash_layers: int  # the first layers route by token id
    routed_scaling_factor: float
    swiglu_limit: float
    norm_eps: float
    hc_mult: int  # residual streams
    hc_eps: float
    hc_sinkhorn_iters: int
    max_context_len: int  # tokens
    rope: RopeConfig  # layers without compression, and the drafter
    compress_rope: RopeConfig  # everything inside compressed layers
    eos_token_ids: tuple[int, ...]
    weight_block: tuple[int, int]  # rows and columns that share an fp8 scale
    expert_dtype: str  # "fp4" or "fp8": decides what the scales of routed experts are called

    family: ClassVar[str] = "deepseek_v4"
    num_kv_heads: ClassVar[int] = 1  # one row is both key and value of all heads

    @property
    def kv_block_multiple(self) -> int:
        """A KV block holds whole entries only."""
        return math.lcm(*(c.rate for c in self.compressions if c))


def deepseek_v4_config(path: Path, raw: Mapping[str, Any]) -> DeepseekV4Config:
    """raw: the folder's parsed config.json. LoadError names key, value and what is allowed."""
    where = str(path / "config.json")
    _refuse_unbuilt(raw, where)

    def size(key: str) -> int:
        return positive(raw, key, where)

    rope_head_dim = size("qk_rope_head_dim")
    config = DeepseekV4Config(
        hidden_size=size("hidden_size"),
        num_layers=size("num_hidden_layers"),
        vocab_size=size("vocab_size"),
        num_heads=size("num_attention_heads"),
        head_dim=size("head_dim"),
        rope_head_dim=rope_head_dim,
        q_lora_rank=size("q_lora_rank"),
        o_groups=size("o_groups"),
        o_lora_rank=size("o_lora_rank"),
        sliding_window=size("sliding_window"),
        compressions=_compressions(raw, where),
        index_num_heads=size("index_n_heads"),
        index_head_dim=size("index_head_dim"),
        index_topk=size("index_topk"),
        num_experts=size("n_routed_experts"),
        num_experts_per_token=size("num_experts_per_tok"),
        moe_intermediate_size=size("moe_intermediate_size"),
        num_hash_layers=_whole(raw, "num_hash_layers", where),
        routed_scaling_factor=positive_number(raw, "routed_scaling_factor", where),
        swiglu_limit=positive_number(raw, "swiglu_limit", where),
        norm_eps=positive_number(raw, "rms_norm_eps", where),
        hc_mult=size("hc_mult"),
        hc_eps=positive_number(raw, "hc_eps", where),
        hc_sinkhorn_iters=size("hc_sinkhorn_iters"),
        max_context_len=size("max_position_embeddings"),
        rope=RopeConfig(
            positive_number(raw, "rope_theta", where),
            rope_head_dim,
            "default",
            size("max_position_embeddings"),
        ),
        compress_rope=_compress_rope(raw, rope_head_dim, where),
        eos_token_ids=eos_token_ids(path, raw),
        weight_block=_weight_block(raw, where),
        expert_dtype=str(raw.get("expert_dtype") or "fp4"),
    )
    _check(config, where)
    return config


def _check(config: DeepseekV4Config, where: str) -> None:
    """What must hold between keys."""
    if config.rope_head_dim % 2 or config.rope_head_dim > min(
        config.head_dim, config.index_head_dim
    ):
        raise LoadError(
            f"{where}: qk_rope_head_dim {config.rope_head_dim} must be even and fit into head_dim "
            f"{config.head_dim} and index_head_dim {config.index_head_dim}"
        )
    if config.num_heads % config.o_groups:
        raise LoadError(
            f"{where}: o_groups {config.o_groups} must divide num_attention_heads "
            f"{config.num_heads}"
        )
    if config.num_experts_per_token > config.num_experts:
        raise LoadError(
            f"{where}: num_experts_per_tok {config.num_experts_per_token} exceeds n_routed_experts "
            f"{config.num_experts}"
        )


def _compressions(raw: Mapping[str, Any], where: str) -> tuple[Compression | None, ...]:
    """The entries of the base layers; those after them belong to MTP or DSpark stages."""
    ratios, num_layers = raw.get("compress_ratios"), positive(raw, "num_hidden_layers", where)
    if not isinstance(ratios, list) or len(ratios) < num_layers:
        raise LoadError(
            f"{where}: compress_ratios {ratios!r} must list a ratio for each of {num_layers} layers"
        )
    unknown = sorted({repr(ratio) for ratio in ratios if ratio not in (0, CSA_RATIO, HCA_RATIO)})
    if unknown or any(ratios[num_layers:]):
        raise LoadError(
            f"{where}: compress_ratios may hold 0, {CSA_RATIO} and {HCA_RATIO}, and only 0 after "
            f"layer {num_layers - 1}; it is {ratios!r}"
        )
    rates = {ratio: positive(raw, key, where, ratio) for ratio, key in _RATE_KEYS.items()}
    return tuple(
        Compression(rates[ratio], overlap=ratio == CSA_RATIO) if ratio else None
        for ratio in ratios[:num_layers]
    )


def _compress_rope(raw: Mapping[str, Any], rope_head_dim: int, where: str) -> RopeConfig:
    """The base of compressed layers with the file's YaRN; V4 never scales cos and sin."""
    scaling = dict(raw.get("rope_scaling") or {})
    if scaling.get("type", scaling.get("rope_type")) == "yarn":
        scaling["attention_factor"] = 1.0
    flat = {
        "rope_scaling": scaling,
        "rope_theta": positive_number(raw, "compress_rope_theta", where),
        "max_position_embeddings": positive(raw, "max_position_embeddings", where),
    }
    return rope_config(flat, rope_head_dim, where)


def _weight_block(raw: Mapping[str, Any], where: str) -> tuple[int, int]:
    quantisation = raw.get("quantization_config") or {}
    block = quantisation.get("weight_block_size", [128, 128])
    method = quantisation.get("quant_method", "fp8")
    fits = isinstance(block, list) and len(block) == 2 and all(_is_positive(n) for n in block)
    if method != "fp8" or not fits:
        raise LoadError(
            f"{where}: quantization_config has quant_method {method!r}, weight_block_size "
            f"{block!r}; fp8 with two positive integers is what can be read"
        )
    return block[0], block[1]


def _refuse_unbuilt(raw: Mapping[str, Any], where: str) -> None:
    for key, wanted in _FIXED.items():
        if raw.get(key, wanted) != wanted:
            raise LoadError(f"{where}: {key} is {raw[key]!r}; only {wanted!r} is built")


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _whole(raw: Mapping[str, Any], key: str, where: str) -> int:
    return 0 if raw.get(key) == 0 else positive(raw, key, where)
