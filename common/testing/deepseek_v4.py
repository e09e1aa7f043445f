"""Writes tiny DeepSeek-V4 checkpoints in the official layout: names, dtypes, formats, config.

Flash-like and Pro-like, with the DSpark drafter, the ordinary MTP block or neither. Like the other
tiny targets, the model mostly continues a token with one fixed other token, and a `good` drafter's
Markov head knows the table. Everything is a pure function of the arguments.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.loading.block_quant import fp8_weight, mxfp4_weight
from common.testing.block_quant import quantise_fp8, quantise_mxfp4
from common.testing.tiny import NUM_SPECIAL, Draw, bigram_head, linear, tiny_tokenizer

Kind = Literal["flash", "pro"]
Drafter = Literal["dspark", "mtp", "none"]
RATIOS: dict[str, list[int]] = {"flash": [0, 0, 4, 128, 4], "pro": [128, 128, 4, 128, 4]}
STAGES = {"dspark": 3, "mtp": 1, "none": 0}

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 8,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 8,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_KINDS: dict[str, dict[str, Any]] = {
    "flash": {
        "index_topk": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 24,
        "routed_scaling_factor": 1.5,
    },
    "pro": {
        "index_topk": 6,
        "moe_intermediate_size": 96,
        "n_routed_experts": 12,
        "num_attention_heads": 8,
        "o_groups": 4,
        "o_lora_rank": 8,
        "q_lora_rank": 40,
        "routed_scaling_factor": 2.5,
    },
}


def tiny_deepseek_v4(
    folder: Path,
    kind: Kind = "flash",
    drafter: Drafter = "dspark",
    *,
    good: bool = True,
    seed: int = 0,
    vocab: int = 96,
    sharpness: float = 6.0,
    noise: float = 0.1,
    **changes: Any,
) -> Path:
    """Writes a checkpoint and returns `folder`.

    good: the drafter's Markov head knows the target's bigram table; otherwise it is random.
    sharpness, noise: how much the favourite continuation stands out, and how much the layers add to
    the streams. changes: config keys, e.g. `compress_rate_hca=16` (so that short prompts cross its
    groups).
    """
    config = {**_COMMON, **_KINDS[kind], "compress_ratios": RATIOS[kind], **changes}
    layers = config["compress_ratios"]
    config |= {"vocab_size": vocab, "eos_token_id": vocab - 1, "num_hidden_layers": len(layers)}
    config["compress_ratios"] = [*layers, *[0] * (STAGES[drafter] or 1)]
    if drafter == "dspark":
        config |= {
            "dspark_block_size": 5,
            "dspark_noise_token_id": vocab - NUM_SPECIAL,
            "dspark_target_layer_ids": list(range(max(0, len(layers) - 3), len(layers))),
            "dspark_markov_rank": config["hidden_size"],
            **{key: value for key, value in changes.items() if key.startswith("dspark_")},
        }
    draw = Draw(seed)
    tensors = _target(draw, config, layers, sharpness, noise)
    for stage in range(STAGES[drafter]):
        layer = _layer(draw, config, ratio=0, by_token_id=False, noise=noise)
        tensors |= {f"mtp.{stage}.{name}": value for name, value in layer.items()}
    if drafter == "dspark":
        tensors |= _dspark(draw, config, tensors, good)
    if drafter == "mtp":
        tensors |= _mtp(draw, config)
    _write(folder, config, stored(tensors, config))
    eos = {"bos_token_id": 0, "eos_token_id": vocab - 1, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(eos))
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


def stored(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor in the dtype and block format that official files give it, scales beside it."""
    high, wide = config["quantization_config"]["weight_block_size"]
    result = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            result[name], result[f"{module}.scale"] = quantise_mxfp4(value)
        elif module.rsplit(".", 1)[-1] in _FP8_MODULES and ".compressor." not in name:
            result[name], result[f"{module}.scale"] = quantise_fp8(value, (high, wide))
        elif name.endswith(".weight"):
            result[name] = value.to(torch.bfloat16)
        else:
            result[name] = value  # hc_*, attn_sink, ape, gate.bias: float32; tid2eid: int64
    return result


_FP8_MODULES = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"}
_FP8_MODULES |= {"main_proj", "e_proj", "h_proj"}


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """Official names -> float32 weights, scales applied; for reference implementations."""
    held = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    config = json.loads((folder / "config.json").read_text())
    high, wide = config["quantization_config"]["weight_block_size"]
    weights = {}
    for name, value in held.items():
        scale = held.get(f"{name.removesuffix('.weight')}.scale")
        if name.endswith(".scale"):
            continue
        if scale is None:
            weights[name] = value if value.dtype == torch.int64 else value.float()
        elif value.dtype == torch.int8:
            weights[name] = mxfp4_weight(name, value, scale).dequantised()
        else:
            weights[name] = fp8_weight(name, value, scale, (high, wide)).dequantised()
    return weights


def _target(
    draw: Draw, config: Mapping[str, Any], layers: Sequence[int], sharpness: float, noise: float
) -> dict[str, Tensor]:
    d, vocab = config["hidden_size"], config["vocab_size"]
    embedding = F.normalize(draw(vocab, d), dim=1) * d**0.5
    tensors = {
        "embed.weight": embedding,
        "head.weight": bigram_head(draw, embedding, sharpness),
        "norm.weight": 1 + 0.1 * draw(d),
        **_mixing(draw, config, "hc_head", config["hc_mult"], 1),
    }
    for i, ratio in enumerate(layers):
        layer = _layer(draw, config, ratio, i < config["num_hash_layers"], noise)
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return tensors


def _mixing(
    draw: Draw, config: Mapping[str, Any], name: str, rows: int, num_scales: int
) -> dict[str, Tensor]:
    """A hyper-connection that is far from its initial values, so that a wrong index shows."""
    return {
        f"{name}_fn": linear(draw, rows, config["hc_mult"] * config["hidden_size"]),
        f"{name}_base": draw(rows),
        f"{name}_scale": 1 + 0.5 * draw(num_scales),
    }


def _layer(
    draw: Draw, config: Mapping[str, Any], ratio: int, by_token_id: bool, noise: float
) -> dict[str, Tensor]:
    d, hc = config["hidden_size"], config["hc_mult"]
    attention = {f"attn.{k}": v for k, v in _attention(draw, config, ratio, noise).items()}
    experts = {f"ffn.{k}": v for k, v in _experts(draw, config, by_token_id, noise).items()}
    return {
        "attn_norm.weight": 1 + 0.1 * draw(d),
        "ffn_norm.weight": 1 + 0.1 * draw(d),
        **_mixing(draw, config, "hc_attn", (2 + hc) * hc, 3),
        **_mixing(draw, config, "hc_ffn", (2 + hc) * hc, 3),
        **attention,
        **experts,
    }


def _attention(
    draw: Draw, config: Mapping[str, Any], ratio: int, noise: float
) -> dict[str, Tensor]:
    d, heads, size = (config[k] for k in ("hidden_size", "num_attention_heads", "head_dim"))
    low, groups, rank = (config[k] for k in ("q_lora_rank", "o_groups", "o_lora_rank"))
    tensors = {
        "wq_a.weight": linear(draw, low, d),
        "q_norm.weight": 1 + 0.1 * draw(low),
        "wq_b.weight": linear(draw, heads * size, low),
        "wkv.weight": linear(draw, size, d),
        "kv_norm.weight": 1.5 + 0.1 * draw(size),
        "attn_sink": draw(heads),
        "wo_a.weight": linear(draw, groups * rank, heads * size // groups),
        "wo_b.weight": linear(draw, d, groups * rank, noise),
    }
    if ratio:
        rate = config.get("compress_rate_hca", 128) if ratio == 128 else ratio
        tensors |= _compressor(draw, d, size, rate, overlap=ratio == 4)
    if ratio == 4:
        count, small = config["index_n_heads"], config["index_head_dim"]
        index = {
            "wq_b.weight": linear(draw, count * small, low),
            "weights_proj.weight": linear(draw, count, d),
            **_compressor(draw, d, small, ratio, overlap=True),
        }
        tensors |= {f"indexer.{name}": value for name, value in index.items()}
    return tensors


def _compressor(draw: Draw, d: int, size: int, rate: int, overlap: bool) -> dict[str, Tensor]:
    channels = 2 * size if overlap else size
    return {
        "compressor.wkv.weight": linear(draw, channels, d),
        "compressor.wgate.weight": linear(draw, channels, d),
        "compressor.ape": draw(rate, channels),
        "compressor.norm.weight": 1.5 + 0.1 * draw(size),
    }


def _experts(
    draw: Draw, config: Mapping[str, Any], by_token_id: bool, noise: float
) -> dict[str, Tensor]:
    d, inner = config["hidden_size"], config["moe_intermediate_size"]
    count, chosen, vocab = (
        config[k] for k in ("n_routed_experts", "num_experts_per_tok", "vocab_size")
    )
    tensors = {"gate.weight": linear(draw, count, d, 2.0)}
    if by_token_id:
        order = torch.rand(vocab, count, generator=draw.generator).argsort(1)
        tensors["gate.tid2eid"] = order[:, :chosen].contiguous()
    else:
        tensors["gate.bias"] = 0.3 * draw(count)
    for name in ("shared_experts", *(f"experts.{i}" for i in range(count))):
        # Large enough that the clamps bite.
        tensors[f"{name}.w1.weight"] = linear(draw, inner, d, 5.0)
        tensors[f"{name}.w3.weight"] = linear(draw, inner, d, 5.0)
        tensors[f"{name}.w2.weight"] = linear(draw, d, inner, noise / 10)
    return tensors


def _dspark(
    draw: Draw, config: Mapping[str, Any], target: Mapping[str, Tensor], good: bool
) -> dict[str, Tensor]:
    d, vocab = config["hidden_size"], config["vocab_size"]
    w1 = F.rms_norm(target["embed.weight"], (d,), target["norm.weight"])
    w2 = target["head.weight"]
    if not good:
        w1, w2 = draw(vocab, d), draw(vocab, d)
    last = f"mtp.{STAGES['dspark'] - 1}."
    return {
        "mtp.0.main_proj.weight": linear(draw, d, len(config["dspark_target_layer_ids"]) * d),
        "mtp.0.main_norm.weight": 1 + 0.1 * draw(d),
        f"{last}norm.weight": 0.3 * (1 + 0.1 * draw(d)),
        **_mixing(draw, config, f"{last}hc_head", config["hc_mult"], 1),
        f"{last}markov_head.markov_w1.weight": w1,
        f"{last}markov_head.markov_w2.weight": w2,
        f"{last}confidence_head.proj.weight": 0.1 * draw(1, 2 * d),
    }


def _mtp(draw: Draw, config: Mapping[str, Any]) -> dict[str, Tensor]:
    d = config["hidden_size"]
    return {
        **{f"mtp.0.{name}.weight": linear(draw, d, d) for name in ("e_proj", "h_proj")},
        **{f"mtp.0.{name}.weight": 1 + 0.1 * draw(d) for name in ("enorm", "hnorm", "norm")},
        **_mixing(draw, config, "mtp.0.hc_head", config["hc_mult"], 1),
    }


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Two shards, as in released files: the base, and what lies under `mtp.`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    parts: list[dict[str, Tensor]] = [{}, {}]
    for name, value in sorted(tensors.items()):
        parts[name.startswith("mtp.")][name] = value.contiguous()
    parts = [part for part in parts if part]
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
