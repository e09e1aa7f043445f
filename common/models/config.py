"""A dense target's config.json: what its forward needs, and a refusal where it asks for more.

Knows Llama's and Qwen3's keys; reads no weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import LoadError
from common.loading.safetensors_files import read_json
from common.nn.block import BlockShape
from common.nn.rope import RopeConfig, rope_config


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of a target and the facts that the engine and the contract need."""

    family: str  # "llama", "qwen3"
    block: BlockShape
    num_layers: int
    vocab_size: int  # rows of the embedding, padding included
    max_context_len: int  # tokens
    rope: RopeConfig
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    kv_block_multiple: ClassVar[int] = 1  # any KV block size will do

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream and of one tap."""
        return self.block.hidden_size

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads per layer."""
        return self.block.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.block.head_dim


def target_config(path: Path, family: str, raw: Mapping[str, Any], qk_norm: bool) -> TargetConfig:
    """Raises LoadError for a missing or senseless key and for features that are not built."""
    where = str(path / "config.json")
    shape = block_shape(raw, where, qk_norm)
    rope = rope_config(raw, shape.head_dim, where)
    return TargetConfig(
        family=family,
        block=shape,
        num_layers=positive(raw, "num_hidden_layers", where),
        vocab_size=positive(raw, "vocab_size", where),
        max_context_len=rope.max_context_len,
        rope=rope,
        tied_embeddings=flag(raw, "tie_word_embeddings", where),
        eos_token_ids=eos_token_ids(path, raw),
    )


def block_shape(raw: Mapping[str, Any], where: str, qk_norm: bool) -> BlockShape:
    """Sizes of one transformer block; shared by targets and the drafter."""
    _refuse_unbuilt(raw, where)
    hidden_size = positive(raw, "hidden_size", where)
    num_heads = positive(raw, "num_attention_heads", where)
    num_kv_heads = positive(raw, "num_key_value_heads", where, default=num_heads)
    head_dim = positive(raw, "head_dim", where, default=hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise LoadError(
            f"{where}: {num_heads} query heads cannot share {num_kv_heads} key heads of "
            f"size {head_dim}: the first must be a multiple of the second, the size even"
        )
    return BlockShape(
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        positive(raw, "intermediate_size", where),
        positive_number({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", where),
        qk_norm,
        flag(raw, "attention_bias", where),
        flag(raw, "mlp_bias", where),
    )


def positive(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """An integer above zero, or `default` if the key is absent or null."""
    value = raw.get(key)
    return _integer(default if value is None else value, 1, f"{where}: {key}", "a positive integer")


def whole(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """An integer from zero on, or `default` if the key is absent or null."""
    value = raw.get(key)
    value = default if value is None else value
    return _integer(value, 0, f"{where}: {key}", "an integer from 0 on")


def _integer(value: object, least: int, name: str, wanted: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LoadError(f"{name} is {value!r}; {wanted} is needed")
    return value


def positive_number(raw: Mapping[str, Any], key: str, where: str) -> float:
    """A number above zero."""
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise LoadError(f"{where}: {key} is {value!r}; a number above 0 is needed")
    return float(value)


def flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    """True or false; absent or null is false."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise LoadError(f"{where}: {key} is {value!r}; true or false is needed")
    return bool(value)


def _refuse_unbuilt(raw: Mapping[str, Any], where: str) -> None:
    """Anything that would change the numbers and that the forward does not do."""
    if raw.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        raise LoadError(f"{where}: quantised weights are not supported; use the bf16 checkpoint")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise LoadError(f"{where}: layer_types is {layer_types!r}; a list is needed")
    if raw.get("use_sliding_window") or set(layer_types) - {"full_attention"}:
        raise LoadError(
            f"{where}: sliding-window attention is not supported (use_sliding_window "
            f"{raw.get('use_sliding_window')!r}, layer_types {layer_types})"
        )


def eos_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json first, then config.json: one id or a list; empty if neither has.

    Raises LoadError for what is no token id of this model.
    """
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    found = generation.get("eos_token_id", raw.get("eos_token_id"))
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list) else (found,)
    vocab_size = positive(raw, "vocab_size", str(path / "config.json"))
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise LoadError(
                f"{path}: eos_token_id {token!r} is no id of a vocabulary of {vocab_size}; correct "
                "it in generation_config.json or config.json"
            )
    return ids
