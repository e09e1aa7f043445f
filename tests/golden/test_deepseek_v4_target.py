"""DeepSeek-V4's target against transformers, in float32, over checkpoints in the official layout.

Every layer kind, YaRN, hash layers; lengths that cross the window, CSA and HCA borders; chunked
prefill, ragged batches, verify blocks with random rejections. transformers gets the dequantised
weights.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config as ReferenceConfig
from transformers import DeepseekV4ForCausalLM

from common.loading.safetensors_files import read_json
from common.models.deepseek_v4.cache import DeepseekV4Cache, recent_blocks_needed
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.nn.attention import AttentionBatch, Segment
from common.testing.deepseek_v4 import plain_weights, tiny_deepseek_v4
from common.testing.numeric import max_difference

TOLERANCE = 1e-4
BLOCK = 16

RENAMES = (
    ("hc_head_", "model.hc_head.hc_"),
    ("embed.", "model.embed_tokens."),
    ("head.", "lm_head."),
    ("norm.", "model.norm."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".attn.indexer.compressor.", ".attn.compressor.indexer."),
    (".attn.indexer.weights_proj.", ".attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".attn.compressor.indexer.q_b_proj."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".ape", ".position_bias"),
    (".attn_sink", ".sinks"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
)


def reference_name(name: str) -> str:
    for old, new in RENAMES:
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name.removeprefix(old)
    return f"model.{name}" if name.startswith("layers.") else name


def reference_model(folder: Path) -> DeepseekV4ForCausalLM:
    raw = read_json(folder / "config.json")
    raw.pop("quantization_config")
    config = ReferenceConfig(**raw)
    config._attn_implementation = config._experts_implementation = "eager"
    weights = {k: v for k, v in plain_weights(folder).items() if not k.startswith("mtp.")}
    state: dict[str, Any] = {}
    for i in range(config.num_hidden_layers):
        own = f"layers.{i}.ffn.experts."

        def parts(which: str, own: str = own) -> list[Tensor]:
            names = [f"{own}{e}.{which}.weight" for e in range(config.n_routed_experts)]
            return [weights.pop(name) for name in names]

        gate_up = [torch.cat(pair) for pair in zip(parts("w1"), parts("w3"), strict=True)]
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        state[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack(parts("w2"))
    state |= {reference_name(name): value for name, value in weights.items()}
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in DeepseekV4ForCausalLM(config).state_dict().items()}
    assert {k: v.shape for k, v in state.items()} == shapes
    model = DeepseekV4ForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


class Requests:
    """Requests over one cache, with shuffled and recycled blocks, as a runner has them."""

    def __init__(
        self,
        model: DeepseekV4Target,
        num_blocks: int = 40,
        taps: tuple[int, ...] = (),
        num_recent: int | None = None,
    ) -> None:
        self.model, self.taps = model, taps
        self.kv: DeepseekV4Cache = model.new_kv(num_blocks, BLOCK, num_recent)
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, tokens: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """Appends tokens to each request, all in one forward; logits and taps of their rows."""
        segments, slots, positions, start = [], [], [], 0
        for name, ids in tokens.items():
            first = self.lengths.setdefault(name, 0)
            end = self.lengths[name] = first + len(ids)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK < end:
                table.append(self.free.pop())
            segments.append(Segment(start, len(ids), end, table))
            positions += range(first, end)
            start += len(ids)
        self.kv.prepare(segments)
        for name, ids in tokens.items():
            end = self.lengths[name]
            slots += self.kv.slots_of(self.tables[name], end - len(ids), end)
        batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
        hidden, taps = self.model.forward(
            torch.cat(list(tokens.values())), self.kv, batch, self.taps
        )
        self.kv.settle(segments)
        sizes = [len(ids) for ids in tokens.values()]
        logits = self.model.logits(hidden).split(sizes)
        split = taps.split(sizes) if taps is not None else [None] * len(sizes)
        return (
            dict(zip(tokens, logits, strict=True)),
            dict(zip(tokens, split, strict=True)),
        )

    def drop(self, name: str) -> None:
        self.kv.release(self.tables[name])
        self.free += self.tables.pop(name)
        del self.lengths[name]


class Pair:
    """The same weights in both implementations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = reference_model(folder)
        self.model, self.report = load_deepseek_v4(folder, torch.float32)

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.reference(input_ids=ids[None]).logits[0]


def some_ids(length: int, seed: int) -> Tensor:
    return torch.randint(96, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["flash", "pro"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One with a window shorter than an HCA group, one where both are as long, as released."""
    kind, sizes = request.param, {"compress_rate_hca": BLOCK}
    sizes["sliding_window"] = {"flash": BLOCK // 2, "pro": BLOCK}[kind]
    folder = tmp_path_factory.mktemp(kind)
    return Pair(tiny_deepseek_v4(folder, kind, noise=1.0, sharpness=1.0, **sizes))


def test_any_length_equals_transformers(pair: Pair) -> None:
    """Windows of 8 and 16, CSA groups of 4, HCA groups of 16, index top 4 and 6; YaRN from position
    0 on.
    """
    for length in (1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 90):
        ids = some_ids(length, length)
        got, _ = Requests(pair.model).step({"a": ids})
        assert max_difference(got["a"], pair.logits(ids)) < TOLERANCE, length


def test_chunks_of_any_size_give_the_same(pair: Pair) -> None:
    ids, chunks = some_ids(120, 1), random.Random(1)
    want, requests, done = pair.logits(ids), Requests(pair.model), 0
    while done < len(ids):
        size = chunks.choice([1, 1, 2, 5, 13, 40])
        part = ids[done : done + size]
        got, _ = requests.step({"a": part})
        assert max_difference(got["a"], want[done : done + size]) < TOLERANCE, (done, size)
        done += size


def test_taps_are_stream_means_of_layer_outputs(pair: Pair) -> None:
    ids, seen = some_ids(40, 2), {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, i=i: seen.__setitem__(i, out[0].mean(1)))
        for i, layer in enumerate(pair.reference.model.layers)
    ]
    pair.logits(ids)
    for hook in hooks:
        hook.remove()
    _, taps = Requests(pair.model, taps=(0, 2, 4)).step({"a": ids})
    assert taps["a"] is not None
    assert max_difference(taps["a"], torch.cat([seen[i] for i in (0, 2, 4)], dim=1)) < TOLERANCE


@pytest.mark.parametrize("bounded", [False, True])
def test_verify_rounds_with_rejections_in_ragged_batches(pair: Pair, bounded: bool) -> None:
    """Requests prefill, verify true and false drafts, roll back, end and restart; with room for all
    window rows, and with the least room that is promised to suffice.
    """
    num_recent = recent_blocks_needed(pair.model.config, BLOCK, 3, 60) if bounded else None
    draw, requests = random.Random(3), Requests(pair.model, num_recent=num_recent)
    texts, wants, ends = {}, {}, 0
    for round_ in range(48):
        while len(texts) < 3:
            name = f"r{round_}-{len(texts)}"
            texts[name] = some_ids(draw.choice([20, 45, 70]), draw.randrange(1 << 30))
            wants[name] = pair.logits(texts[name])
        step, kept = {}, {}
        for name, text in texts.items():
            start = requests.lengths.get(name, 0)
            size = draw.choice([1, 2, 6]) if start > 40 else draw.choice([3, 16, 20])
            ids = text[start : start + size].clone()
            kept[name] = draw.randrange(max(1, len(ids) - 5), len(ids) + 1)  # so many are right
            ids[kept[name] :] = some_ids(len(ids) - kept[name], draw.randrange(1 << 30))
            step[name] = ids
        starts = {name: requests.lengths.get(name, 0) for name in step}
        got, _ = requests.step(step)
        for name, right in kept.items():
            start = starts[name]
            want = wants[name][start : start + right]
            assert max_difference(got[name][:right], want) < TOLERANCE, (round_, name, start)
            requests.lengths[name] = start + right
            if start + right == len(texts[name]):
                requests.drop(name)
                del texts[name], wants[name]
                ends += 1
    assert ends >= 5, "requests should end and their blocks be used again"


def test_batch_invariant_rows_are_equal_to_the_bit(pair: Pair) -> None:
    """Alone, in chunks or beside others, with rejected drafts before: the same logits and taps."""
    model, _ = load_deepseek_v4(pair.folder, torch.float32, numerics="batch_invariant")
    ids, other = some_ids(60, 4), some_ids(50, 5)
    alone = Requests(model, taps=(2, 4))
    want, want_taps = alone.step({"a": ids})
    assert max_difference(want["a"], pair.logits(ids)) < TOLERANCE
    mixed, done, draw = Requests(model, taps=(2, 4)), 0, random.Random(6)
    mixed.step({"b": other[:20]})
    while done < len(ids):
        size = draw.choice([1, 3, 6, 11])
        wrong = some_ids(draw.randrange(3), draw.randrange(1 << 30))
        part = torch.cat([ids[done : done + size], wrong])
        own = mixed.lengths["b"]
        got, taps = mixed.step({"b": other[own : own + 2], "a": part})
        num_right = len(part) - len(wrong)
        assert torch.equal(got["a"][:num_right], want["a"][done : done + num_right]), done
        assert taps["a"] is not None and want_taps["a"] is not None
        assert torch.equal(taps["a"][:num_right], want_taps["a"][done : done + num_right])
        done = mixed.lengths["a"] = done + num_right


def test_released_rates_and_several_scale_blocks(tmp_path: Path) -> None:
    """HCA groups of 128 tokens, a window of 128, fp8 scales per 32 rows and columns."""
    config = read_json(tiny_deepseek_v4(tmp_path / "base") / "config.json")
    quantisation = config["quantization_config"] | {"weight_block_size": [32, 32]}
    changes = {"sliding_window": 128, "quantization_config": quantisation, "index_topk": 16}
    pair = Pair(tiny_deepseek_v4(tmp_path / "wide", noise=1.0, **changes))
    ids = some_ids(300, 7)
    kv, table = pair.model.new_kv(6, 128), [4, 1, 3]
    want, done = pair.logits(ids), 0
    for end in (100, 127, 128, 133, 260, 300):
        batch = AttentionBatch(
            [Segment(0, end - done, end, table)],
            torch.tensor(kv.slots_of(table, done, end)),
            torch.arange(done, end),
        )
        hidden, _ = pair.model.forward(ids[done:end], kv, batch)
        assert max_difference(pair.model.logits(hidden), want[done:end]) < TOLERANCE, end
        done = end
