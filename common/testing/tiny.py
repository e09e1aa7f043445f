"""Writes tiny but real checkpoints in milliseconds: config.json, safetensors, tokenizer.json.

A `bigram` target mostly continues each token with one fixed other token (its layers only perturb
that), so that a `good` drafter, whose Markov head knows the same table, is often right and
sometimes not. Knows no service. Everything is a pure function of the arguments.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

Family = Literal["llama", "qwen3"]
Head = Literal["vanilla", "gated", "rnn", "none"]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What a drafter's config copies from its target's.
INHERITED = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
)
NUM_SPECIAL = 2  # the last two ids: <mask> (never emitted by a bigram target), <eos>


def tiny_target(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    vocab: int = 64,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    max_len: int = 512,
    bigram: bool = True,
    sharpness: float = 4.0,
    noise: float = 0.35,
    rope: Mapping[str, Any] | None = None,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a target and returns `folder`.

    sharpness: logits of a bigram target's favourite over the rest, roughly; noise: size of what the
    layers add. bigram=False: all random, tied embeddings. rope: keys of `rope_scaling`.
    """
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": 2 * hidden,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": not bigram,
        "rope_theta": 10000.0,
        "rope_scaling": dict(rope) if rope else None,
        "eos_token_id": vocab - 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    draw = Draw(seed)
    embedding = F.normalize(draw(vocab, hidden), dim=1) * hidden**0.5
    tensors = {
        "model.norm.weight": 1 + 0.1 * draw(hidden),
        "model.embed_tokens.weight": embedding if bigram else 0.5 * embedding,
    }
    for i in range(layers):
        layer = _layer(draw, config, noise, qk_norm=family == "qwen3")
        tensors |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    if bigram:
        tensors["lm_head.weight"] = bigram_head(draw, embedding, sharpness)
    _write(folder, config, {k: v.to(dtype) for k, v in tensors.items()}, num_shards)
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    return folder


def tiny_drafter(
    folder: Path,
    target_folder: Path,
    head: Head = "vanilla",
    *,
    good: bool = True,
    seed: int = 1,
    layers: int = 1,
    block_size: int = 4,
    draft_vocab: int | None = None,
    confidence: bool = True,
    confidence_with_markov: bool = True,
    own_embedding: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a DeepSpec-format drafter for a bigram target and returns `folder`.

    good: its Markov head holds the target's bigram table (needs head other than "none"); otherwise
    it is random and confident, so that nearly all its drafts are rejected. draft_vocab: reduced
    vocabulary.
    """
    target = json.loads((target_folder / "config.json").read_text())
    vocab, num_layers = target["vocab_size"], target["num_hidden_layers"]
    has_markov = head != "none"
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "draft_vocab_size": draft_vocab or vocab,
        "target_layer_ids": list(range(num_layers - 1)) or [-1],
        "num_target_layers": num_layers,
        "mask_token_id": vocab - NUM_SPECIAL,
        "markov_rank": target["hidden_size"] if has_markov else 0,
        "markov_head_type": head if has_markov else "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and confidence_with_markov and has_markov,
        **{key: target[key] for key in INHERITED},
        "intermediate_size": target["hidden_size"],
    }
    known = {
        k: v.float() for f in target_folder.glob("*.safetensors") for k, v in load_file(f).items()
    }
    draw = Draw(seed)
    tensors = _drafter_tensors(draw, config, known, good)
    if own_embedding:
        tensors["embed_tokens.weight"] = known["model.embed_tokens.weight"]
    _write(folder, config, {k: v if k == "d2t" else v.to(dtype) for k, v in tensors.items()}, 1)
    return folder


def _drafter_tensors(
    draw: "Draw", config: Mapping[str, Any], known: Mapping[str, Tensor], good: bool
) -> dict[str, Tensor]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    size = config["draft_vocab_size"]
    kept = torch.randperm(vocab, generator=draw.generator)[:size].sort().values
    tensors = {
        "fc.weight": linear(draw, hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": 1 + 0.1 * draw(hidden),
        "norm.weight": 1 + 0.1 * draw(hidden),
        "lm_head.weight": draw(size, hidden) * (0.1 if good else 1.0),
    }
    for i in range(config["num_hidden_layers"]):
        layer = _layer(draw, config, out_scale=1.0, qk_norm=True)
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    if size != vocab:
        tensors["d2t"] = kept - torch.arange(size)
    if rank:
        tensors |= _markov(draw, config["markov_head_type"], known, kept, good)
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = 0.1 * draw(1, width)
        tensors["confidence_head.proj.bias"] = torch.tensor([1.0])
    return tensors


class Draw:
    """Standard normal tensors of any shape, one stream per seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def linear(draw: Draw, rows: int, cols: int, scale: float = 1.0) -> Tensor:
    return draw(rows, cols) * (scale * cols**-0.5)


def _layer(
    draw: Draw, config: Mapping[str, Any], out_scale: float, qk_norm: bool
) -> dict[str, Tensor]:
    """One block; `out_scale` sizes what it adds to the residual stream."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_width, kv_width = (
        config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads")
    )
    tensors = {
        "input_layernorm.weight": 1 + 0.1 * draw(hidden),
        "self_attn.q_proj.weight": linear(draw, q_width, hidden, 2.0),
        "self_attn.k_proj.weight": linear(draw, kv_width, hidden, 2.0),
        "self_attn.v_proj.weight": linear(draw, kv_width, hidden),
        "self_attn.o_proj.weight": linear(draw, hidden, q_width, out_scale),
        "post_attention_layernorm.weight": 1 + 0.1 * draw(hidden),
        "mlp.gate_proj.weight": linear(draw, inner, hidden),
        "mlp.up_proj.weight": linear(draw, inner, hidden),
        "mlp.down_proj.weight": linear(draw, hidden, inner, 2 * out_scale),
    }
    if qk_norm:
        tensors |= {f"self_attn.{n}_norm.weight": 1 + 0.1 * draw(head_dim) for n in "qk"}
    return tensors


def bigram_head(draw: Draw, embedding: Tensor, sharpness: float) -> Tensor:
    """Row next(t) looks for t's embedding; `next` is one cycle through all but the special ids."""
    vocab, hidden = embedding.shape
    order = torch.randperm(vocab - NUM_SPECIAL, generator=draw.generator)
    head = 0.1 * draw(vocab, hidden)
    head[order.roll(-1)] += embedding[order] * (sharpness / hidden)
    return head


def _markov(
    draw: Draw, head: str, known: Mapping[str, Tensor], kept: Tensor, good: bool
) -> dict[str, Tensor]:
    """Good: W2 · W1[x] are the target's logits if its layers added nothing; rank = hidden size."""
    embedding, small = known["model.embed_tokens.weight"], 0.05
    hidden = rank = embedding.shape[1]
    w1 = F.rms_norm(embedding, (hidden,), known["model.norm.weight"], 1e-6)
    w2 = known["lm_head.weight" if "lm_head.weight" in known else "model.embed_tokens.weight"][kept]
    if not good:
        w1, w2 = draw(*w1.shape), draw(*w2.shape)
    tensors = {}
    if head == "gated":  # a gate that is nearly open
        tensors["gate_proj.weight"] = small * draw(rank, hidden + rank)
        tensors["gate_proj.bias"] = torch.full((rank,), 4.0)
    if head == "rnn":  # the output third passes e through the linear part of tanh
        joint = small**2 * draw(3 * rank, 2 * rank + hidden)
        joint[2 * rank :, rank : 2 * rank] += torch.eye(rank)
        tensors["joint_proj.weight"], tensors["joint_proj.bias"] = joint, torch.zeros(3 * rank)
        w1, w2 = w1 * small, w2 / small
    tensors["markov_w1.weight"], tensors["markov_w2.weight"] = w1, w2
    return {f"markov_head.{name}": value for name, value in tensors.items()}


def _write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_shards: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: value.contiguous() for name, value in sorted(tensors.items())}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def tiny_tokenizer(vocab: int) -> tokenizers.Tokenizer:
    """Byte-level BPE: letters, space, digits first, other bytes next, then pairs of letters."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    first = [*string.ascii_lowercase, "Ġ", *string.digits, *string.ascii_uppercase, ".", ",", "?"]
    plain = [*first, *sorted(alphabet - set(first))][: vocab - NUM_SPECIAL]
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    merges = pairs[: vocab - NUM_SPECIAL - len(plain)]
    tokens = [*plain, *(a + b for a, b in merges)]
    tokens += [f"<unused{i}>" for i in range(vocab - NUM_SPECIAL - len(tokens))]
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<mask>", "<eos>"])
    assert tokenizer.get_vocab_size() == vocab, f"{tokenizer.get_vocab_size()} tokens for {vocab=}"
    return tokenizer
