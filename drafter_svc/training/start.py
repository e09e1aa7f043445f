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


def drafter_config(settings: Settings) -> DrafterConfig:
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
        target_layer_ids=settings.drafter_taps,
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
    """A drafter whose layers start as the target's last ones. d2t: [V_draft].

    Starting there saves about half of a short training's time against random weights.
    """
    torch.manual_seed(seed)
    drafter = Drafter(config, target[EMBED], d2t)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
        first = config.num_target_layers - config.num_hidden_layers
        for i, layer in enumerate(drafter.layers):
            _copy_layer(layer, target, f"model.layers.{first + i}.", config.intermediate_size)
        # Context rows start as the last tap with a little of the others mixed in.
        drafter.fc.weight.mul_(0.2)
        drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        last_norm = target[f"model.layers.{config.num_target_layers - 1}.input_layernorm.weight"]
        drafter.hidden_norm.weight.copy_(last_norm.float())
        drafter.norm.weight.copy_(target["model.norm.weight"].float())
        drafter.lm_head.weight.copy_(target["lm_head.weight"][d2t])
        drafter.markov_head.markov_w1.weight.normal_(std=config.markov_rank**-0.5)
        drafter.markov_head.markov_w2.weight.zero_()
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.zero_()
    return drafter


def _copy_layer(layer: nn.Module, target: dict[str, Tensor], prefix: str, size: int) -> None:
    """Copies a target layer; of its MLP the `size` neurons with the largest weights."""
    norms = [target[f"{prefix}mlp.{name}_proj.weight"].float() for name in ("gate", "up")]
    norms.append(target[f"{prefix}mlp.down_proj.weight"].float().T)
    strength = torch.stack([weight.norm(dim=1) for weight in norms]).prod(0)
    kept = strength.topk(size).indices.sort().values
    for name, parameter in layer.named_parameters():
        if prefix + name not in target:  # q_norm and k_norm, which a Llama target lacks
            continue
        source = target[prefix + name].float()
        if name.startswith("mlp.down_proj"):
            source = source[:, kept]
        elif name.startswith("mlp."):
            source = source[kept]
        parameter.copy_(source)
