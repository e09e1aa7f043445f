"""Synthetic config.json contents of every public DSpark checkpoint shape, and of its look-alikes.

Minimal: only the keys that detection reads, with their published values. Each constant is read-only
by convention; `with_(CONFIG, key=value)` makes a changed copy.
"""

from typing import Any

Config = dict[str, Any]
DROP = object()  # `with_(CONFIG, key=DROP)` removes the key


def with_(config: Config, **changes: Any) -> Config:
    """A shallow copy of `config` with keys set, or removed where the value is `DROP`."""
    return {k: v for k, v in (config | changes).items() if v is not DROP}


def within(config: Config, section: str, **changes: Any) -> Config:
    """A copy of `config` with `changes` made inside its object at `section`."""
    return config | {section: with_(config.get(section, {}), **changes)}


FP8_BLOCKS: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FLASH_MTP: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "vocab_size": 129280,
    "hc_mult": 4,
    "expert_dtype": "fp4",
    "quantization_config": FP8_BLOCKS,
}
DSPARK_KEYS: Config = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
FLASH_0731 = FLASH_MTP | DSPARK_KEYS
PRO_MTP = FLASH_MTP | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
}
PRO_0813 = (
    PRO_MTP
    | DSPARK_KEYS
    | {
        "dspark_target_layer_ids": [58, 59, 60],
        "dspark_markov_rank": 512,
    }
)
VISION = FLASH_0731 | {"num_nextn_predict_layers": 3}
OVERRIDDEN = FLASH_0731 | {
    "architectures": ["DeepSeekV4MTPModel"],
    "model_type": "deepseek_mtp",
    "n_predict": 1,
}
V41: Config = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "vision_config": {"model_type": "deepseek_v41_vision"},
    "quantization_config": FP8_BLOCKS | {"weight_block_size": [32, 32], "expert_dtype": "fp4"},
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
}
QWEN8B: Config = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "layer_types": ["full_attention"] * 5,
}
QWEN8B_DFLASH = with_(
    QWEN8B,
    markov_rank=0,
    enable_confidence_head=False,
    markov_head_type=DROP,
    confidence_head_with_markov=DROP,
)
GEMMA = QWEN8B | {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text",
    "num_target_layers": 48,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "mask_token_id": 4,
}
SPEC8: Config = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkDraftModel"],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "sample_from_anchor": True,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "vocab_size": 151936,
    },
}
SPEC_GLM = within(
    SPEC8
    | {
        "block_size": 16,
        "aux_hidden_state_layer_ids": [8, 23, 39, 55, 70],
        "mask_token_id": 154856,
        "sample_from_anchor": False,
    },
    "speculators_config",
    proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 15}],
)
SPECFORGE: Config = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "dflash_config": {
        "projector_type": "dspark",
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "attention_mode": "gqa",
    },
}
K3: Config = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "block_size": 7,
    "target_layer_ids": [8, 30, 57],
    "num_target_layers": 3,
    "markov_rank": 256,
}
LFM2: Config = {
    "architectures": ["Lfm2DSparkDraftModel"],
    "model_type": "qwen3",
    "block_size": 9,
    "rope_is_neox_style": False,
    "dflash_config": {"target_layer_ids": [1, 5, 9], "mask_token_id": 16, "markov_rank": 256},
}
LING = QWEN8B | {"architectures": ["LingDSparkModel"]}
NEMO: Config = {
    "architectures": ["DeepseekV4DSparkModel"],
    "model_type": "deepseek_v4",
    "block_size": 5,
    "target_layer_ids": [40, 41, 42],
    "num_nextn_predict_layers": 0,
    "markov_rank": 256,
    "compress_ratios": None,
}
HYBRID: Config = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "markov_rank": 256,
    "dflash_config": {"target_layer_ids": [1, 9, 17], "mask_token_id": 151669},
}
DFLASH_NESTED: Config = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"block_size": 16, "target_layer_ids": [1, 9, 17], "mask_token_id": 151669},
}
EAGLE3: Config = {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "ttt_length": 7,
    "draft_num_hidden_layers": 1,
    "target_layer_ids": [1, 9, 17, 25, 33],
}
V3_NOISE: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
} | DSPARK_KEYS
LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN8B_TARGET: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "vocab_size": 151936,
}

_STAGE_PARTS = [
    f"{module}.w{part}.{kind}"
    for module in ("ffn.shared_experts", "ffn.experts.0")
    for part in (1, 2, 3)
    for kind in ("weight", "scale")
]


def index_of(*names: str) -> Config:
    """A parsed model.safetensors.index.json that holds `names` and one tensor of the target."""
    names = ("embed.weight", *names)
    return {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}


CLASSIC_NAMES = [f"mtp.0.{module}.weight" for module in ("enorm", "hnorm", "e_proj", "h_proj")]
DSPARK_NAMES = [
    "mtp.0.main_proj.weight",
    "mtp.0.main_norm.weight",
    *(f"mtp.{stage}.{part}" for stage in range(3) for part in _STAGE_PARTS),
    "mtp.2.norm.weight",
    *(f"mtp.2.hc_head_{part}" for part in ("fn", "base", "scale")),
    "mtp.2.markov_head.markov_w1.weight",
    "mtp.2.markov_head.markov_w2.weight",
    "mtp.2.confidence_head.proj.weight",
]
IDX_MTP = index_of(*CLASSIC_NAMES)
IDX_DSPARK = index_of(*DSPARK_NAMES)
IDX_NONE = index_of()
