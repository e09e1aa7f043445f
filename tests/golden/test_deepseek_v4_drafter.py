"""DeepSeek-V4's drafter against a straight-line reference written here from its description.

The reference runs one request, keeps no cache and attends with a dense matrix over explicit context
rows; all it shares with the model is the dequantised checkpoint. Then both halves together: drafted
greedy decoding equals plain decoding, whatever the drafter's context went through.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, LoadError
from common.models.deepseek_v4.drafter import (
    DSparkV4,
    drafter_config,
    load_deepseek_v4_drafter,
    load_deepseek_v4_projector,
)
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.nn.attention import AttentionBatch, Segment
from common.testing.deepseek_v4 import plain_weights, tiny_deepseek_v4
from common.testing.numeric import max_difference

torch.set_num_threads(1)
BLOCK = 16


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Reference:
    """One block of one request, from config.json and the tensors by their official names."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = plain_weights(folder)
        self.last = max(int(name.split(".")[1]) for name in self.w if name.startswith("mtp."))

    def turned(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """x [T, heads, D]: pairs (2i, 2i + 1) of the last channels, by position * 10000^(-2i/r)."""
        r = self.c["qk_rope_head_dim"]
        rate = 10000.0 ** (-torch.arange(0, r, 2).double() / r)
        spin = torch.polar(torch.ones(1).double(), sign * positions[:, None, None] * rate)
        tail = torch.view_as_complex(x[..., -r:].double().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(tail * spin).flatten(-2)
        return torch.cat([x[..., :-r], turned.to(x.dtype)], -1)

    def collapse(self, h: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (self.w[f"{prefix}_{part}"] for part in ("fn", "base", "scale"))
        z = rms(h.flatten(1)) @ fn.T
        pre = (z[:, :4] * scale[0] + base[:4]).sigmoid() + 1e-6
        x = torch.einsum("tj,tjd->td", pre, h)
        if len(base) == 4:
            return x, x, x
        post = 2 * (z[:, 4:8] * scale[1] + base[4:8]).sigmoid()
        comb = (z[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + 1e-6
        for i in range(2 * self.c["hc_sinkhorn_iters"] - 1):  # columns first and last
            comb = comb / (comb.sum(2 if i % 2 else 1, keepdim=True) + 1e-6)
        return x, post, comb

    def spread(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return torch.einsum("tk,td->tkd", post, y) + torch.einsum("tjk,tjd->tkd", comb, h)

    def attention(self, x: Tensor, main_x: Tensor, a: str) -> Tensor:
        """x: rows of the block; main_x [n, d] of positions 0..n-1."""
        w, heads, n = self.w, self.c["num_attention_heads"], len(main_x)
        positions = torch.arange(n + len(x))
        q = rms(x @ w[f"{a}wq_a.weight"].T, w[f"{a}q_norm.weight"]) @ w[f"{a}wq_b.weight"].T
        q = self.turned(rms(q.view(len(x), heads, -1)), positions[n:])
        rows = torch.cat([main_x, x]) @ w[f"{a}wkv.weight"].T
        rows = self.turned(rms(rows, w[f"{a}kv_norm.weight"])[:, None], positions)[:, 0]
        rows = rows[max(0, n - self.c["sliding_window"]) :]
        scores = torch.einsum("thd,kd->thk", q, rows) * rows.shape[1] ** -0.5
        weights = scores.exp()
        weights = weights / (weights.sum(-1) + w[f"{a}attn_sink"].exp())[..., None]
        out = self.turned(torch.einsum("thk,kd->thd", weights, rows), positions[n:], sign=-1)
        groups = self.c["o_groups"]
        wo_a = w[f"{a}wo_a.weight"].unflatten(0, (groups, -1))
        low = torch.einsum("tgi,goi->tgo", out.reshape(len(x), groups, -1), wo_a)
        return low.flatten(1) @ w[f"{a}wo_b.weight"].T

    def experts(self, x: Tensor, f: str) -> Tensor:
        limit = self.c["swiglu_limit"]

        def expert(row: Tensor, name: str) -> Tensor:
            gate, up = (self.w[f"{name}.{part}.weight"] @ row for part in ("w1", "w3"))
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return self.w[f"{name}.w2.weight"] @ (gate * gate.sigmoid() * up)

        result = []
        for row in x:
            scores = torch.log1p((self.w[f"{f}gate.weight"] @ row).exp()).sqrt()
            order = (scores + self.w[f"{f}gate.bias"]).argsort(descending=True)
            chosen = order[: self.c["num_experts_per_tok"]]
            weights = scores[chosen] / scores[chosen].sum() * self.c["routed_scaling_factor"]
            routed = [v * expert(row, f"{f}experts.{i}") for i, v in zip(chosen, weights)]  # noqa: B905
            result.append(sum(routed, expert(row, f"{f}shared_experts")))
        return torch.stack(result)

    def block(self, taps: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """taps [n, m * d] of positions 0..n-1, anchor at position n -> hidden, base logits."""
        main_x = rms(taps @ self.w["mtp.0.main_proj.weight"].T, self.w["mtp.0.main_norm.weight"])
        noise = [self.c["dspark_noise_token_id"]] * (self.c["dspark_block_size"] - 1)
        h = self.w["embed.weight"][[anchor, *noise]][:, None].expand(-1, 4, -1)
        for k in range(self.last + 1):
            s = f"mtp.{k}."
            x, post, comb = self.collapse(h, f"{s}hc_attn")
            y = self.attention(rms(x, self.w[f"{s}attn_norm.weight"]), main_x, f"{s}attn.")
            h = self.spread(y, h, post, comb)
            x, post, comb = self.collapse(h, f"{s}hc_ffn")
            y = self.experts(rms(x, self.w[f"{s}ffn_norm.weight"]), f"{s}ffn.")
            h = self.spread(y, h, post, comb)
        hidden = self.collapse(h, f"mtp.{self.last}.hc_head")[0]
        return hidden, rms(hidden, self.w[f"mtp.{self.last}.norm.weight"]) @ self.w["head.weight"].T

    def heads(self, hidden: Tensor, previous: list[int]) -> tuple[Tensor, Tensor]:
        """Markov bias and confidence of each row, given the token before its draft."""
        m = f"mtp.{self.last}."
        e = self.w[f"{m}markov_head.markov_w1.weight"][previous]
        confidence = torch.cat([hidden, e], 1) @ self.w[f"{m}confidence_head.proj.weight"].T
        return e @ self.w[f"{m}markov_head.markov_w2.weight"].T, confidence[:, 0]


def shuffled_tables(count: int, length: int, seed: int) -> list[list[int]]:
    blocks = list(range(count * length))
    random.Random(seed).shuffle(blocks)
    return [blocks[i::count] for i in range(count)]


@pytest.mark.parametrize("kind", ["flash", "pro"])
def test_batched_blocks_equal_the_reference(kind: Any, tmp_path: Path) -> None:
    """Contexts shorter and longer than the window of 8, one block for all of them at once."""
    folder = tiny_deepseek_v4(tmp_path, kind, good=False, noise=1.0)
    model, _ = load_deepseek_v4_drafter(folder, torch.float32)
    reference, generator = Reference(folder), torch.Generator().manual_seed(0)
    lengths, anchors = [1, 7, 8, 9, 40], [5, 17, 30, 44, 61]
    taps = [torch.randn(n, model.config.feature_width, generator=generator) for n in lengths]
    tables, kv = shuffled_tables(5, 4, 1), model.new_kv(20, BLOCK)
    for rows, table in zip(taps, tables, strict=True):
        for start, stop in ((0, len(rows) // 2), (len(rows) // 2, len(rows))):
            slots = torch.tensor(kv.slots_of(table, start, stop), dtype=torch.int64)
            model.ingest(model.project(rows[start:stop]), kv, slots, torch.arange(start, stop))
    hidden, logits = model.block(torch.tensor(anchors), torch.tensor(lengths), 5, kv, tables)
    previous = torch.randint(90, (5, 5), generator=generator)
    for i in range(5):
        want_hidden, want_logits = reference.block(taps[i], anchors[i])
        assert max_difference(hidden[i], want_hidden) < 1e-4
        assert max_difference(logits[i], want_logits) < 1e-4
        bias, confidence = reference.heads(want_hidden, previous[i].tolist())
        got = model.bias(previous[i], hidden[i], model.start_state(5))[0]
        assert max_difference(got, bias) < 1e-4
        got_confidence = model.confidence(hidden[i], previous[i])
        assert got_confidence is not None
        assert max_difference(got_confidence, confidence) < 1e-4
    fewer, _ = model.block(torch.tensor(anchors), torch.tensor(lengths), 2, kv, tables)
    # All rows run, and the first block left no trace; the head rounds by the rows it is given.
    assert max_difference(fewer, hidden[:, :2]) < 1e-5


def draft(
    model: DSparkV4, anchors: Tensor, at: Tensor, kv: Any, tables: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Greedy drafts [R, B], and the rows behind them [R, B, d]."""
    hidden, logits = model.block(anchors, at, model.config.block_size, kv, tables)
    tokens = [anchors]
    for place in range(model.config.block_size):
        bias, _ = model.bias(tokens[-1], hidden[:, place], None)
        tokens.append((logits[:, place] + bias).argmax(1))
    return torch.stack(tokens[1:], 1), hidden


def advance(
    target: DeepseekV4Target, kv: Any, tables: list[list[int]], starts: list[int], ids: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and taps of the rows of each request."""
    counts, first, segments, slots = [len(own) for own in ids], 0, [], []
    for table, start, count in zip(tables, starts, counts, strict=True):
        segments.append(Segment(first, count, start + count, table))
        slots += kv.slots_of(table, start, start + count)
        first += count
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    batch = AttentionBatch(segments, torch.tensor(slots), positions)
    hidden, taps = target.forward(torch.cat(ids), kv, batch, (2, 3, 4))
    assert taps is not None
    return list(target.logits(hidden).split(counts)), list(taps.split(counts))


class Speculation:
    """Both halves decode together, greedily, until every text has so many new tokens."""

    def __init__(
        self,
        models: tuple[DeepseekV4Target, DSparkV4],
        prompts: list[Tensor],
        num_new: int,
        *,
        chunk: int = 100,
        afresh: bool = False,
    ) -> None:
        """chunk: prompt rows per forward. afresh: before every round both sides lose what they hold
        and compute it again from the texts, as after a preemption and an eviction.
        """
        self.target, self.drafter = models
        self.chunk, self.tables = chunk, shuffled_tables(len(prompts), 6, 2)
        self.texts = [prompt.tolist() for prompt in prompts]
        self.kept: list[list[int]] = [[] for _ in prompts]  # drafts, round by round
        self.hidden: list[list[Tensor]] = [[] for _ in prompts]  # of the drafts, round by round
        self.forget()
        for i, text in enumerate(self.texts):
            text.append(int(self.compute(i, len(text))[-1].argmax()))
        while min(len(t) - len(p) for t, p in zip(self.texts, prompts, strict=True)) < num_new:
            if afresh:
                self.forget()
                for i, text in enumerate(self.texts):
                    self.compute(i, len(text) - 1)
            self.round()

    def forget(self) -> None:
        count = len(self.tables)
        self.kv = self.target.new_kv(6 * count, BLOCK)
        self.context = self.drafter.new_kv(6 * count, BLOCK)

    def compute(self, i: int, stop: int) -> Tensor:
        """Rows [0, stop) of text i through the target, those of the window to the drafter too."""
        for start in range(0, stop, self.chunk):
            ids = torch.tensor(self.texts[i][start : min(stop, start + self.chunk)])
            (logits,), (taps,) = advance(self.target, self.kv, [self.tables[i]], [start], [ids])
            first = max(start, stop - self.drafter.config.context_window)
            self.commit(i, first, taps[first - start :])
        return logits

    def commit(self, i: int, start: int, rows: Tensor) -> None:
        positions = torch.arange(start, start + len(rows))
        slots = torch.tensor(self.context.slots_of(self.tables[i], start, start + len(rows)))
        self.drafter.ingest(self.drafter.project(rows), self.context, slots.long(), positions)

    def round(self) -> None:
        anchors = torch.tensor([text[-1] for text in self.texts])
        at = [len(text) - 1 for text in self.texts]
        drafts, hidden = draft(self.drafter, anchors, torch.tensor(at), self.context, self.tables)
        rows = list(torch.cat([anchors[:, None], drafts], 1))
        logits, taps = advance(self.target, self.kv, self.tables, at, rows)
        for i, text in enumerate(self.texts):
            best = logits[i].argmax(1)
            accepted = int((best[:-1] == drafts[i]).long().cumprod(0).sum())
            text += [*drafts[i, :accepted].tolist(), int(best[accepted])]
            self.commit(i, at[i], taps[i][: accepted + 1])
            self.kept[i].append(accepted)
            self.hidden[i].append(hidden[i])


PROMPTS, NUM_NEW = [torch.arange(n) * 5 % 90 for n in (1, 6, 21)], 36


def both(folder: Path) -> tuple[DeepseekV4Target, DSparkV4]:
    target, _ = load_deepseek_v4(folder, torch.float32)
    return target, load_deepseek_v4_drafter(folder, torch.float32)[0]


@pytest.mark.parametrize("good", [True, False])
def test_drafted_decoding_equals_plain_decoding(good: bool, tmp_path: Path) -> None:
    models = both(tiny_deepseek_v4(tmp_path, good=good, compress_rate_hca=16))
    tables, kv = shuffled_tables(3, 6, 2), models[0].new_kv(18, BLOCK)
    plain = [prompt.tolist() for prompt in PROMPTS]
    logits, _ = advance(models[0], kv, tables, [0, 0, 0], PROMPTS)
    for _ in range(NUM_NEW):
        for tokens, rows in zip(plain, logits, strict=True):
            tokens.append(int(rows[-1].argmax()))
        starts = [len(tokens) - 1 for tokens in plain]
        newest = [torch.tensor(tokens[-1:]) for tokens in plain]
        logits, _ = advance(models[0], kv, tables, starts, newest)

    drafted = Speculation(models, PROMPTS, NUM_NEW)
    for got, want in zip(drafted.texts, plain, strict=True):
        assert got[: len(want)] == want[: len(got)]
    kept = [count for counts in drafted.kept for count in counts]
    assert (sum(kept) / len(kept) > 2) if good else (sum(kept) / len(kept) < 1)


def test_acceptance_minds_no_batch_no_chunk_no_rejected_and_no_evicted_row(tmp_path: Path) -> None:
    """Round by round the same drafts are kept, whatever else is in a forward, however the prompt
    was cut, and whether both sides went on with their caches or filled them anew.
    """
    models = both(tiny_deepseek_v4(tmp_path, noise=0.3, compress_rate_hca=16))
    base = Speculation(models, PROMPTS, NUM_NEW)
    assert {0, 1, 2} < {count for counts in base.kept for count in counts}
    chunks = Speculation(models, PROMPTS, NUM_NEW, chunk=3)
    afresh = Speculation(models, PROMPTS, NUM_NEW, afresh=True)
    alone = [Speculation(models, [prompt], NUM_NEW) for prompt in PROMPTS]
    for i in range(len(PROMPTS)):
        for run, own in ((chunks, i), (afresh, i), (alone[i], 0)):
            rounds = len(run.kept[own])
            assert rounds > 5 and run.kept[own] == base.kept[i][:rounds]
            for found, wanted in zip(run.hidden[own], base.hidden[i], strict=False):
                assert max_difference(found, wanted) < 1e-4


def test_each_half_needs_its_own_shards_only(tmp_path: Path) -> None:
    """As in released files: the base in several shards, of which the drafter needs embedding and
    head.
    """
    folder = tiny_deepseek_v4(tmp_path, noise=1.0)
    base, drafter = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    layers = "layers.safetensors"
    tensors = load_file(folder / base)
    outside = {k: tensors.pop(k) for k in list(tensors) if not k.startswith("layers.")}
    save_file(outside, folder / base)
    save_file(tensors, folder / layers)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | dict.fromkeys(tensors, layers)
    index.write_text(json.dumps({"weight_map": places}))

    (folder / layers).unlink()
    _, report = load_deepseek_v4_drafter(folder, torch.float32)
    assert report.num_tensors == sum(name.startswith("mtp.") for name in places) + 2
    assert set(report.ignored) == outside.keys() - {"embed.weight", "head.weight"}
    said = f"{layers} not opened: its {len(tensors)} tensors do not concern the drafter"
    assert said in report.notes
    with pytest.raises(LoadError, match=layers):
        load_deepseek_v4(folder, torch.float32)
    save_file(tensors, folder / layers)
    (folder / drafter).unlink()
    load_deepseek_v4(folder, torch.float32)
    with pytest.raises(LoadError, match=drafter):
        load_deepseek_v4_drafter(folder, torch.float32)


def test_early_files_have_no_confidence_head(tmp_path: Path) -> None:
    folder = tiny_deepseek_v4(tmp_path)
    edit_drafter(folder, lambda tensors: tensors.pop("mtp.2.confidence_head.proj.weight"))
    model, report = load_deepseek_v4_drafter(folder, torch.float32)
    assert model.confidence(torch.zeros(2, 64), torch.tensor([1, 2])) is None
    assert "96 parameters under mtp.*, experts stacked" in report.notes


def edit_drafter(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of the drafter's shard, and the index with them."""
    shard, index = "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    tensors, raw = load_file(folder / shard), json.loads(index.read_text())
    edit(tensors)
    kept = {k: v for k, v in raw["weight_map"].items() if not k.startswith("mtp.")}
    index.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, shard)}))
    save_file(tensors, folder / shard)


def test_tensors_of_the_wrong_stage_or_none_are_refused(tmp_path: Path) -> None:
    moves = {
        "mtp.2.norm.weight": "mtp.1.norm.weight",
        "mtp.0.main_norm.weight": "mtp.1.main_norm.weight",
        "mtp.1.attn.wkv.scale": "mtp.1.attn.wkv.weight_scale",
        "mtp.2.ffn.shared_experts.w2.weight": "mtp.2.ffn.shared_experts.down.weight",
        "mtp.2.ffn.gate.bias": "mtp.2.ffn.gate.tid2eid",
    }
    for old, new in moves.items():
        folder = tiny_deepseek_v4(tmp_path / old)
        edit_drafter(folder, lambda t, old=old, new=new: t.update({new: t.pop(old)}))  # type: ignore[misc]
        with pytest.raises((LoadError, ConfigError)):
            load_deepseek_v4_drafter(folder)


def test_checkpoints_without_a_drafter_are_refused(tmp_path: Path) -> None:
    folder = tiny_deepseek_v4(tmp_path / "mtp", drafter="mtp")
    with pytest.raises(LoadError, match="'v4_mtp'"):
        load_deepseek_v4_drafter(folder)
    folder = tiny_deepseek_v4(tmp_path / "half", dspark_markov_rank=None)
    with pytest.raises(ConfigError, match="dspark_markov_rank"):
        drafter_config(folder)


def test_the_projector_is_the_drafters_own(tmp_path: Path) -> None:
    folder = tiny_deepseek_v4(tmp_path)
    model, _ = load_deepseek_v4_drafter(folder, torch.float32)
    rows = torch.randn(3, model.config.feature_width)
    projector = load_deepseek_v4_projector(folder, torch.float32)
    assert torch.equal(projector(rows), model.project(rows))
