"""The DSpark drafter against a straight-line reference written here from the paper's formulas.

The reference runs one request, keeps no cache and attends with a dense matrix; all it shares with
the model is the checkpoint file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.models.dspark_qwen3 import DSparkQwen3, load_drafter
from common.testing.numeric import max_difference
from common.testing.tiny import Head, tiny_drafter, tiny_target

torch.set_num_threads(1)


class Reference:
    """One block of one request, from config.json and the tensors by name."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.theta = json.loads((target_folder / "config.json").read_text())["rope_theta"]
        if "embed_tokens.weight" not in self.w:
            target = load_file(target_folder / "model.safetensors")
            self.w["embed_tokens.weight"] = target["model.embed_tokens.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, D]; each pair (i, i + D/2) turned by position * theta^(-2i/D)."""
        half = x.shape[-1] // 2
        turn = positions[:, None].double() * self.theta ** (-torch.arange(half).double() / half)
        low, high = x[..., :half].double(), x[..., half:].double()
        cos, sin = turn.cos()[:, None], turn.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)

    def block(self, taps: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """taps: [n, m * d] of positions 0..n-1; anchor at position n. Gives hidden, base logits."""
        c = self.config
        context = self.norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        n, size, head_dim = len(context), c["block_size"], c["head_dim"]
        ids = torch.tensor([anchor] + [c["mask_token_id"]] * (size - 1))
        x = self.w["embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            a, normed = f"layers.{i}.self_attn", self.norm(x, f"layers.{i}.input_layernorm")
            rows = torch.cat([context, normed])
            q = (normed @ self.w[f"{a}.q_proj.weight"].T).view(size, -1, head_dim)
            k = (rows @ self.w[f"{a}.k_proj.weight"].T).view(n + size, -1, head_dim)
            v = (rows @ self.w[f"{a}.v_proj.weight"].T).view(n + size, -1, head_dim)
            q = self.rotated(self.norm(q, f"{a}.q_norm"), torch.arange(n, n + size))
            k = self.rotated(self.norm(k, f"{a}.k_norm"), torch.arange(n + size))
            shared = c["num_attention_heads"] // c["num_key_value_heads"]
            heads = []
            for h in range(c["num_attention_heads"]):
                weights = (q[:, h] @ k[:, h // shared].T / head_dim**0.5).softmax(-1)
                heads.append(weights @ v[:, h // shared])
            x = x + torch.cat(heads, -1) @ self.w[f"{a}.o_proj.weight"].T
            m, normed = f"layers.{i}.mlp", self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (normed @ self.w[f"{m}.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ self.w[f"{m}.down_proj.weight"].T
        hidden = self.norm(x, "norm")
        return hidden, hidden @ self.w["lm_head.weight"].T

    def corrected(self, hidden: Tensor, base: Tensor, previous: list[int]) -> tuple[Tensor, Tensor]:
        """Markov-corrected logits and confidences of all rows, given the token before each row."""
        c, logits, confidences = self.config, [], []
        rank = c["markov_rank"]
        state = torch.zeros(rank)
        for k, token in enumerate(previous):
            h, row = hidden[k], base[k]
            e = self.w["markov_head.markov_w1.weight"][token] if rank else torch.zeros(0)
            if rank and c["markov_head_type"] == "vanilla":
                row = row + self.w["markov_head.markov_w2.weight"] @ e
            elif rank and c["markov_head_type"] == "gated":
                z = self.w["markov_head.gate_proj.weight"] @ torch.cat([h, e])
                gate = (z + self.w["markov_head.gate_proj.bias"]).sigmoid()
                row = row + self.w["markov_head.markov_w2.weight"] @ (gate * e)
            elif rank:
                z = self.w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
                z = z + self.w["markov_head.joint_proj.bias"]
                gate, candidate, out = z[:rank].sigmoid(), z[rank : 2 * rank].tanh(), z[2 * rank :]
                state = gate * state + (1 - gate) * candidate
                row = row + self.w["markov_head.markov_w2.weight"] @ out.tanh()
            logits.append(row)
            if c["enable_confidence_head"]:
                seen = torch.cat([h, e]) if c["confidence_head_with_markov"] else h
                score = self.w["confidence_head.proj.weight"] @ seen
                confidences.append(score + self.w["confidence_head.proj.bias"])
        return torch.stack(logits), torch.cat(confidences) if confidences else torch.zeros(0)


def shaken(folder: Path) -> None:
    """Random heads in which every term matters; those of a good drafter keep some near zero."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(9)
    for name in tensors:
        if "markov" in name or "confidence" in name:
            shape = tensors[name].shape
            tensors[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors")


CASES: dict[str, tuple[Head, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "gated": ("gated", {}),
    "rnn": ("rnn", {}),
    "no-head": ("none", {}),
    "reduced-vocab": ("rnn", {"draft_vocab": 40}),
    "no-confidence": ("gated", {"confidence": False}),
    "confidence-without-markov": ("vanilla", {"confidence_with_markov": False}),
    "own-embedding-two-layers": ("vanilla", {"own_embedding": True, "layers": 2, "block_size": 7}),
}


def run_block(
    model: DSparkQwen3, taps: list[Tensor], anchors: list[int], tables: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Ingests every context in two pieces, then runs one block for all requests at once."""
    kv = model.new_kv(num_blocks=24, kv_block_size=4)
    for rows, table in zip(taps, tables, strict=True):
        for start, stop in ((0, 3), (3, len(rows))):
            slots = torch.tensor(kv.slots_of(table, start, stop))
            model.ingest(model.project(rows[start:stop]), kv, slots, torch.arange(start, stop))
    before = [rows.clone() for rows in kv.rows]
    positions = torch.tensor([len(rows) for rows in taps])
    size = model.config.block_size
    out = model.block(torch.tensor(anchors), positions, size, kv, tables)
    written = {
        s
        for n, t in zip(positions.tolist(), tables, strict=True)
        for s in kv.slots_of(t, n, n + size)
    }
    kept = [s for s in range(kv.num_slots) if s not in written]
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(before, kv.rows, strict=True))
    return out


@pytest.mark.parametrize("case", CASES)
def test_drafter_equals_reference(case: str, tmp_path: Path) -> None:
    head, options = CASES[case]
    target = tiny_target(tmp_path / "target", "qwen3", layers=4, vocab=64)
    folder = tiny_drafter(tmp_path / "drafter", target, head, **options)
    shaken(folder)
    model, report = load_drafter(folder, target, torch.float32)
    assert not report.ignored and not report.notes
    reference, generator = Reference(folder, target), torch.Generator().manual_seed(3)
    lengths, anchors = (11, 5, 22), [7, 0, 33]
    tables = [[0, 1, 2, 3, 4], [20, 9, 7], [6, 5, 23, 10, 11, 12, 13, 14]]
    width = model.config.feature_width
    taps = [torch.randn(n, width, generator=generator) for n in lengths]
    hidden, base = run_block(model, taps, anchors, tables)

    expected = [reference.block(t, a) for t, a in zip(taps, anchors, strict=True)]
    assert max_difference(hidden, torch.stack([e[0] for e in expected])) < 1e-4
    assert max_difference(base, torch.stack([e[1] for e in expected])) < 1e-4

    size = model.config.block_size
    previous = torch.randint(64, (3, size), generator=generator)
    previous[:, 0] = torch.tensor(anchors)
    state = model.start_state(3)
    for k in range(size):
        bias, state = model.bias(previous[:, k], hidden[:, k], state)
        assert (bias is None) == (head == "none")
        logits = base[:, k] if bias is None else base[:, k] + bias
        confidence = model.confidence(hidden[:, k], previous[:, k])
        for r in range(3):
            rows, scores = reference.corrected(*expected[r], previous[r, : k + 1].tolist())
            assert max_difference(logits[r], rows[k]) < 1e-4
            if confidence is not None:
                assert max_difference(confidence[r], scores[k]) < 1e-4
        assert (confidence is None) == (options.get("confidence") is False)


def test_fewer_drafts_are_the_first_rows_of_the_block(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "llama", layers=3)
    model, _ = load_drafter(tiny_drafter(tmp_path / "drafter", target), target, torch.float32)
    taps = torch.randn(6, model.config.feature_width, generator=torch.Generator().manual_seed(0))
    hidden, logits = run_block(model, [taps], [4], [[0, 1, 2]])
    kv = model.new_kv(3, 4)
    model.ingest(model.project(taps), kv, torch.arange(6), torch.arange(6))
    few = model.block(torch.tensor([4]), torch.tensor([6]), 2, kv, [[0, 1, 2]])
    assert max_difference(few[0], hidden[:, :2]) < 1e-5
    assert max_difference(few[1], logits[:, :2]) < 1e-5


def test_reduced_vocabulary_maps_to_target_ids(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    folder = tiny_drafter(tmp_path / "drafter", target, draft_vocab=20)
    model, _ = load_drafter(folder, target, torch.float32)
    offsets = load_file(folder / "model.safetensors")["d2t"]
    ids = model.to_target_ids(torch.arange(20))
    assert ids.tolist() == [i + int(offsets[i]) for i in range(20)]
    assert len(set(ids.tolist())) == 20 and ids.tolist() != list(range(20))
