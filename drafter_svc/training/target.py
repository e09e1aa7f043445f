"""A compact batched Llama forward that writes training text and keeps its inner states.

One row per text, a static KV cache, bf16 on the CPU. Beside the logits it returns what a drafter
learns from: the tapped residual streams and the last hidden row. Does not know prompts or files,
and is not the service's engine: it trades paging and exact widths for tokens per second.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from drafter_svc.training.rope import rotary_tables, rotate

GROUP = 24  # rows that share one attention call; sorted by length so that little is padding


class BatchTarget:
    """Up to `num_slots` texts of up to `max_len` tokens; `decode` advances them all."""

    def __init__(self, folder: Path, taps: list[int], num_slots: int, max_len: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.d = config["hidden_size"]
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.d // self.num_heads
        self.eps = config["rms_norm_eps"]
        self.vocab_size = config["vocab_size"]
        self.taps = taps
        assert max(taps) < self.num_layers - 1, (
            f"tap {max(taps)} is the last layer, which is forbidden"
        )
        self._load(load_file(folder / "model.safetensors"))
        self.cos, self.sin = rotary_tables(max_len, self.head_dim, config["rope_theta"])
        kv = (self.num_layers, num_slots, self.num_kv_heads)
        # Keys lie transposed, so that q·k reads memory in order: 3x faster in bf16.
        self.keys = torch.zeros(*kv, self.head_dim, max_len, dtype=torch.bfloat16)
        self.values = torch.zeros(*kv, max_len, self.head_dim, dtype=torch.bfloat16)
        none = torch.zeros(0, dtype=torch.long)
        states = torch.zeros(0, (len(taps) + 1) * self.d, dtype=torch.bfloat16)
        self.prefix = (none, states, self.keys[:, 0, :, :, :0], self.values[:, 0, :, :0])

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.embed = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embed)
        self.norm = tensors["model.norm.weight"]
        self.layers = []
        for i in range(self.num_layers):
            get = {n: tensors[f"model.layers.{i}.{n}.weight"] for n in _LAYER_TENSORS}
            self.layers.append(
                (
                    get["input_layernorm"],
                    torch.cat([get[f"self_attn.{n}_proj"] for n in "qkv"]),
                    get["self_attn.o_proj"],
                    get["post_attention_layernorm"],
                    torch.cat([get["mlp.gate_proj"], get["mlp.up_proj"]]),
                    get["mlp.down_proj"],
                )
            )

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """ids, positions: [n]. Returns taps and last hidden side by side: [n, (m + 1) * d]."""
        num_q, num_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        hidden, kept = F.embedding(ids, self.embed), []
        for i, (norm_in, qkv, out, norm_mlp, gate_up, down) in enumerate(self.layers):
            mixed = F.linear(F.rms_norm(hidden, (self.d,), norm_in, self.eps), qkv)
            q, k, v = mixed.split([num_q, num_kv, num_kv], dim=-1)
            q = rotate(q.unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)
            k = rotate(k.unflatten(-1, (self.num_kv_heads, self.head_dim)), cos, sin)
            v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
            hidden = hidden + F.linear(attend(i, q, k, v), out)
            gate, up = F.linear(F.rms_norm(hidden, (self.d,), norm_mlp, self.eps), gate_up).chunk(
                2, -1
            )
            hidden = hidden + F.linear(F.silu(gate) * up, down)
            if i in self.taps:
                kept.append(hidden)
        kept.append(F.rms_norm(hidden, (self.d,), self.norm, self.eps))
        return torch.cat(kept, dim=-1)

    def remember_prefix(self, ids: torch.Tensor) -> None:
        """Keeps the states and KV of a prefix that prompts share, so that `prefill` can skip it."""
        n = len(ids)
        states = self.prefill(0, ids)
        keys, values = self.keys[:, 0, :, :, :n].clone(), self.values[:, 0, :, :n].clone()
        self.prefix = (ids, states, keys, values)

    def prefill(self, slot: int, ids: torch.Tensor) -> torch.Tensor:
        """Runs a prompt [n] into `slot`; returns its states [n, (m + 1) * d]."""
        known, states, keys, values = self.prefix
        start, n = len(known), len(ids)
        if start and not torch.equal(ids[:start], known):
            start = 0
        self.keys[:, slot, :, :, :start] = keys[..., :start]
        self.values[:, slot, :, :start] = values[:, :, :start]
        if start == n:
            return states
        positions = torch.arange(start, n)
        mask = torch.arange(n) <= positions[:, None]

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[i, slot, :, :, start:n] = k.permute(1, 2, 0)
            self.values[i, slot, :, start:n] = v.transpose(0, 1)
            mixed = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                self.keys[i, slot, :, :, :n].transpose(1, 2).contiguous()[None],
                self.values[i, slot, :, :n][None],
                attn_mask=mask,
                enable_gqa=True,
            )
            return mixed[0].transpose(0, 1).flatten(1)

        return torch.cat([states[:start], self._forward(ids[start:], positions, attend)])

    def decode(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """One token per slot: ids [S] at positions `lengths` [S]; returns states [S, (m + 1) * d].

        Works for any slot order; is fast when neighbouring slots have like lengths.
        """
        slots = torch.arange(ids.shape[0])
        groups = []
        for low in range(0, ids.shape[0], GROUP):
            own = lengths[low : low + GROUP]
            width = min((int(own.max()) // 16 + 1) * 16, self.keys.shape[-1])
            mask = torch.zeros(len(own), 1, 1, width, dtype=torch.bfloat16)
            mask.masked_fill_(torch.arange(width) > own[:, None, None, None], -torch.inf)
            groups.append((slice(low, low + len(own)), width, mask))
        shape = (self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim)

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[i], self.values[i]
            keys[slots, :, :, lengths] = k
            values[slots, :, lengths] = v
            q = (q * self.head_dim**-0.5).unflatten(1, shape[:2])
            parts = []
            for rows, width, mask in groups:
                scores = torch.matmul(q[rows], keys[rows, :, :, :width]) + mask
                parts.append(torch.matmul(scores.softmax(-1), values[rows, :, :width]))
            return torch.cat(parts).flatten(1)

        return self._forward(ids, lengths, attend)

    def permute_slots(self, order: torch.Tensor) -> None:
        """Slot j takes over what slot order[j] held. order: [S], a permutation."""
        for i in range(self.num_layers):
            self.keys[i] = self.keys[i].index_select(0, order)
            self.values[i] = self.values[i].index_select(0, order)

    def candidates(
        self, last_hidden: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The k best next tokens: float32 logits [n, k], their ids [n, k], log-sum-exp of all [n].

        bf16 logits near 20 lie 0.125 apart, so the best ones are computed again in float32.
        """
        logits = F.linear(last_hidden, self.head).float()
        lse = logits.logsumexp(-1)
        rough, ids = top_candidates(logits, k)
        exact = torch.bmm(self.head[ids].float(), last_hidden.float().unsqueeze(-1)).squeeze(-1)
        change = (exact - lse[:, None]).exp().sum(-1) - (rough - lse[:, None]).exp().sum(-1)
        return exact, ids, lse + change.clamp(min=-0.9).log1p()


def top_candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk of [n, V], V divisible by 128: the best k lie in the k blocks of largest maximum."""
    blocks = logits.unflatten(1, (-1, 128))
    best = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    inside = blocks.gather(1, best[:, :, None].expand(-1, -1, 128)).flatten(1)
    values, places = inside.topk(k, dim=-1)
    return values, best.gather(1, places // 128) * 128 + places % 128


_LAYER_TENSORS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
