"""Where a drafter's weights start: the target's head, norms and, where shapes fit, a target layer.

Also decides the drafter's shape from the target's config and the settings.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drafter_svc.training.model import Drafter, DrafterConfig
from drafter_svc.training.settings import Settings

EMBED = "model.embed_tokens.weight"


def drafter_config(settings: Settings, num_taps: int) -> DrafterConfig:
    """The target's geometry with the settings' depth, widths and draft vocabulary."""
    target = json.loads((settings.target / "config.json").read_text(encoding="utf-8"))
    return DrafterConfig(
        hidden_size=target["hidden_size"],
        num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=target["num_key_value_heads"],
        head_dim=target["head_dim"],
        intermediate_size=settings.intermediate_size,
        vocab_size=target["vocab_size"],
        draft_vocab_size=settings.draft_vocab_size,
        rope_theta=target["rope_theta"],
        rms_norm_eps=target["rms_norm_eps"],
        max_position_embeddings=target["max_position_embeddings"],
        num_target_layers=target["num_hidden_layers"],
        target_layer_ids=settings.taps[:num_taps],
        num_hidden_layers=settings.num_layers,
        block_size=settings.block_size,
        markov_rank=settings.markov_rank,
        mask_token_id=settings.mask_token_id,
        num_anchors=settings.num_anchors,
    )


def target_tensors(folder: Path) -> dict[str, Tensor]:
    """The target's weights; `lm_head.weight` is filled in when tied."""
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors[EMBED])
    return tensors


def new_drafter(
    config: DrafterConfig, target: dict[str, Tensor], d2t: Tensor, seed: int
) -> Drafter:
    """A drafter with started weights. d2t: [V_draft]."""
    torch.manual_seed(seed)
    drafter = Drafter(config, target[EMBED], d2t)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        depth_scale = (2 * config.num_hidden_layers) ** -0.5
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.mul_(depth_scale)  # type: ignore[union-attr, operator]
            layer.mlp.down_proj.weight.mul_(depth_scale)  # type: ignore[union-attr, operator]
        drafter.norm.weight.copy_(target["model.norm.weight"].float())
        drafter.lm_head.weight.copy_(target["lm_head.weight"][d2t].float())
        drafter.markov_head.markov_w1.weight.normal_(std=config.markov_rank**-0.5)
        drafter.markov_head.markov_w2.weight.zero_()
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.zero_()
    return drafter
