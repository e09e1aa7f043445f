"""Where a drafter's weights start: the target's head, norms and last layers, and ready-made heads.

A short training cannot afford to discover what can be written down: that the row after the context
must read the last context row. Most heads of layer 0 start as exact "previous row" heads that copy
the context's main directions into the block. Also decides the drafter's shape from the settings.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drafter_svc.training.model import Attention, Drafter, DrafterConfig, Layer
from drafter_svc.training.settings import Settings

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPY_SHARE = 0.8  # of layer 0's heads
COPY_PAIRS = 4  # fastest rotary pairs, which tell neighbouring positions apart
COPY_GAIN = 3.0**0.5  # of q and k in those pairs: 99 % of the weight falls on the last row
COPY_SCALE = 0.3  # of the copied row, root-mean-square 1, beside embeddings of about 0.13


def drafter_config(settings: Settings) -> DrafterConfig:
    """The target's geometry with the settings' depth, widths and draft vocabulary."""
    target = json.loads((settings.target / "config.json").read_text(encoding="utf-8"))
    return DrafterConfig(
        hidden_size=target["hidden_size"],
        num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=settings.num_kv_heads,
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
    tensors.setdefault(HEAD, tensors[EMBED])
    return tensors


@torch.no_grad()
def new_drafter(
    config: DrafterConfig, target: dict[str, Tensor], d2t: Tensor, sample: Tensor, seed: int
) -> Drafter:
    """A drafter with started weights. d2t: [V_draft]; sample: tapped rows [n, m * d] of texts."""
    torch.manual_seed(seed)
    drafter = Drafter(config, target[EMBED], target[HEAD], d2t)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    first = config.num_target_layers - config.num_hidden_layers
    layers = [layer for layer in drafter.layers if isinstance(layer, Layer)]
    for i, layer in enumerate(layers):
        _copy_layer(layer, target, f"model.layers.{first + i}.", config.intermediate_size)
    # Context rows start as the last tap with a little of the others mixed in.
    drafter.fc.weight.mul_(0.2)
    drafter.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    context = _normed(drafter.fc(sample.float()))
    _copy_last_row(layers[0], drafter, context)
    drafter.norm.weight.copy_(target["model.norm.weight"].float())
    drafter.markov_head.markov_w1.weight.normal_(std=config.markov_rank**-0.5)
    drafter.markov_head.markov_w2.weight.zero_()
    drafter.confidence_head.proj.weight.zero_()
    drafter.confidence_head.proj.bias.zero_()
    return drafter


@torch.no_grad()
def adopt(drafter: Drafter, folder: Path) -> None:
    """Takes over the weights of an exported drafter of the same depth and widths.

    Its draft vocabulary and Markov rank may be smaller: rows go by target id, the added rank starts
    without effect.
    """
    tensors = load_file(folder / "model.safetensors")
    own = drafter.state_dict()
    d2t = tensors.pop("d2t")
    t2d = torch.full((len(drafter.embed),), -1)
    t2d[drafter.d2t] = torch.arange(len(drafter.d2t))
    places = t2d[d2t + torch.arange(len(d2t))]
    tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if name == "markov_head.markov_w2.weight":
            own[name][places[places >= 0], : tensor.shape[1]] = tensor[places >= 0].float()
        else:
            own[name][..., : tensor.shape[-1]] = tensor.float()


def _normed(rows: Tensor) -> Tensor:
    return rows / rows.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt()


def _copy_layer(layer: Layer, target: dict[str, Tensor], prefix: str, size: int) -> None:
    """Copies a target layer, norms folded into its weights so that context rows get them too.

    Of the MLP the `size` neurons with the largest weights; key and value heads are repeated.
    """

    def get(name: str) -> Tensor:
        return target[f"{prefix}{name}.weight"].float()

    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    norm_in, norm_mlp = get("input_layernorm"), get("post_attention_layernorm")
    attention.q_proj.weight.copy_(get("self_attn.q_proj") * norm_in)
    attention.o_proj.weight.copy_(get("self_attn.o_proj"))
    for name in ("k_proj", "v_proj"):
        weight = get(f"self_attn.{name}").unflatten(0, (-1, head_dim))
        repeats = attention.num_kv_heads // weight.shape[0]
        repeated = weight.repeat_interleave(repeats, dim=0).flatten(0, 1)
        getattr(attention, name).weight.copy_(repeated * norm_in)
    gate, up, down = (get(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.topk(size).indices.sort().values
    layer.mlp.gate_proj.weight.copy_(gate[kept] * norm_mlp)
    layer.mlp.up_proj.weight.copy_(up[kept] * norm_mlp)
    layer.mlp.down_proj.weight.copy_(down[:, kept])


def _separator(positive: Tensor, negative: Tensor) -> Tensor:
    """A direction [d] with rows·direction near 1 on `positive` and near -1 on `negative` [n, d]."""
    rows = torch.cat([positive, negative, torch.eye(positive.shape[1])])
    wanted = torch.zeros(len(rows), 1)
    wanted[: len(positive)] = 1
    wanted[len(positive) : len(positive) + len(negative)] = -1
    return torch.linalg.lstsq(rows, wanted).solution[:, 0]


def _copy_last_row(layer: Layer, drafter: Drafter, context: Tensor) -> None:
    """Turns most heads of `layer` into readers of the context's last row. context: [n, d] normed.

    Queries become one constant vector (the per-head norm removes what varies), keys another, turned
    so that rotary embedding aligns them one position apart; block rows get the opposite key.
    """
    attention: Attention = layer.self_attn
    config, head_dim = drafter.config, attention.head_dim
    num_copies = max(1, int(COPY_SHARE * attention.num_kv_heads))
    groups = attention.num_heads // attention.num_kv_heads
    embeddings = drafter.embed.float()
    rows = torch.cat([embeddings[drafter.d2t], embeddings[config.mask_token_id].expand(400, -1)])
    rows = _normed(rows)
    pairs = torch.arange(min(COPY_PAIRS, head_dim // 2))
    turn = config.rope_theta ** (-2.0 * pairs / head_dim)
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    query[pairs] = 1.0
    key[pairs], key[pairs + head_dim // 2] = turn.cos(), turn.sin()
    from_block = torch.outer(query, _separator(rows, rows[:0]))
    from_context = torch.outer(key, _separator(context, rows))
    num_q, num_kv = num_copies * groups * head_dim, num_copies * head_dim
    attention.q_proj.weight[:num_q].mul_(0.02).add_(from_block.repeat(num_copies * groups, 1))
    attention.k_proj.weight[:num_kv].mul_(0.02).add_(from_context.repeat(num_copies, 1))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[pairs] = norm.weight[pairs + head_dim // 2] = COPY_GAIN
    _, _, basis = torch.linalg.svd(context - context.mean(0), full_matrices=False)
    mixed = torch.linalg.qr(torch.randn(num_kv, num_kv))[0] @ basis[:num_kv]
    attention.v_proj.weight[:num_kv] = mixed
    attention.o_proj.weight.mul_(0.1)
    back = mixed.T.unflatten(1, (num_copies, 1, head_dim)).expand(-1, -1, groups, -1)
    attention.o_proj.weight[:, :num_q] = COPY_SCALE / groups * back.flatten(1)
    for module, scale in ((layer.mlp.gate_proj, 1.0), (layer.mlp.up_proj, 1.0)):
        module.weight.normal_(std=scale * module.in_features**-0.5)
    layer.mlp.down_proj.weight.normal_(std=0.3 * layer.mlp.down_proj.in_features**-0.5)
