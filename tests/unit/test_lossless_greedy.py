"""Temperature 0: ids with a real DSpark drafter equal plain decoding's, on 200 random prompts.

fp32 tiny models of both families, all three Markov heads, one request at a time and eight side by
side, prompts longer than a step, stops of all kinds inside blocks, forced rejections, bad drafters.
The drafter runs in this process; the services' own suites repeat this over gRPC.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.loading.tokenizer import Tokenizer
from common.models.dense import DenseTarget
from common.models.dspark_qwen3 import DSparkQwen3, load_drafter
from common.testing.tiny import tiny_drafter
from verifier_svc.drafting import Draft, Drafts, FeatureSource, NoDrafter
from verifier_svc.request import Entry, FinishReason, Plan, Request

PROMPTS_PER_FAMILY = 100
VOCAB, MAX_LEN = 64, 128
HEADS = {  # name: arguments of tiny_drafter
    "vanilla": {"head": "vanilla"},
    "gated": {"head": "gated", "confidence": False},
    "rnn": {"head": "rnn", "draft_vocab": 40, "layers": 2},
    "useless": {"head": "vanilla", "good": False},
}


class LocalDrafter(NoDrafter):
    """A DSpark drafter without a service: one region of context KV per live request.

    `spoil_every` n: every n-th place of a block is spoiled, which forces rejections at all of them.
    """

    def __init__(self, model: DSparkQwen3, num_sessions: int, spoil_every: int = 0) -> None:
        self.model = model
        self.num_spoiled = 0
        self._region = MAX_LEN + model.config.block_size
        self._kv = model.new_kv(num_sessions, self._region)
        self._free = list(range(num_sessions))
        self._sessions: dict[Request, tuple[int, int]] = {}  # block, context rows held
        self._spoil_every, self._count = spoil_every, 0

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        """Context rows of every request that drafts, then one block for all of them."""
        entries = [entry for entry in plan.entries if entry.max_drafts]
        for entry in entries:
            request = entry.request
            block, num_held = self._sessions.get(request) or (self._free.pop(), 0)
            self._ingest(features.read([(request, num_held, entry.start)]), block, num_held)
            self._sessions[request] = (block, entry.start)
        return Drafts(self._draft(entries) if entries else {})

    def _ingest(self, data: bytes, block: int, start: int) -> None:
        width = self.model.config.feature_width
        rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, width)
        positions = torch.arange(start, start + len(rows))
        slots = positions + block * self._region
        self.model.ingest(self.model.project(rows), self._kv, slots, positions)

    def _draft(self, entries: list[Entry]) -> dict[int, Draft]:
        model, requests = self.model, [entry.request for entry in entries]
        num_drafts = min(max(entry.max_drafts for entry in entries), model.config.block_size)
        previous = torch.tensor([request.token_ids[-1] for request in requests])
        anchors = torch.tensor([entry.start for entry in entries])
        tables = [[self._sessions[request][0]] for request in requests]
        hidden, logits = model.block(previous, anchors, num_drafts, self._kv, tables)
        state, columns, confidences = model.start_state(len(requests)), [], []
        for k in range(num_drafts):
            if (confidence := model.confidence(hidden[:, k], previous)) is not None:
                confidences.append(confidence.tolist())
            bias, state = model.bias(previous, hidden[:, k], state)
            row = logits[:, k] if bias is None else logits[:, k] + bias
            previous = model.to_target_ids(row.argmax(1))
            self._count += 1
            if self._spoil_every and self._count % self._spoil_every == 0:
                previous = (previous + 1) % VOCAB
                self.num_spoiled += len(requests)
            columns.append(previous.tolist())
        drafts = {}
        for i, entry in enumerate(entries):
            draft = Draft(tuple(c[i] for c in columns), tuple(c[i] for c in confidences))
            drafts[entry.request.session_id] = draft.truncated(entry.max_drafts)
        return drafts

    def release(self, request: Request) -> None:
        block, _ = self._sessions.pop(request, (None, 0))
        if block is not None:
            self._free.append(block)

    def close(self) -> None:
        pass


Answer = tuple[list[int], str, FinishReason | None, str]
Asks = list[dict[str, object]]


@pytest.fixture(scope="module")
def plain(make_rig, tiny_models) -> Callable[[str], tuple[DenseTarget, Path, Asks, list[Answer]]]:
    """`plain(family)`: the model, its folder, 100 asks and what plain decoding answers."""
    made = {}

    def get(family: str) -> tuple[DenseTarget, Path, Asks, list[Answer]]:
        if family not in made:
            model, folder = tiny_models(family, layers=3, max_len=MAX_LEN, vocab=VOCAB, noise=0.5)
            asks = _asks(random.Random(family))
            free = _answers(make_rig(model, Tokenizer(folder)), asks)
            asks = [
                _with_stop(ask, answer, i)
                for i, (ask, answer) in enumerate(zip(asks, free, strict=True))
            ]
            made[family] = (model, folder, asks, _answers(make_rig(model, Tokenizer(folder)), asks))
        return made[family]

    return get


def _asks(generator: random.Random) -> Asks:
    return [
        {
            "prompt_ids": [
                generator.randrange(VOCAB - 2) for _ in range(generator.choice([1, 3, 9, 30, 70]))
            ],
            "temperature": 0.0,
            "max_tokens": generator.randrange(1, 24),
        }
        for _ in range(PROMPTS_PER_FAMILY)
    ]


def _with_stop(ask: dict[str, object], answer: Answer, number: int) -> dict[str, object]:
    """Places a stop that really comes somewhere in the answer of most requests."""
    token_ids, text, _, _ = answer
    middle = len(token_ids) // 2
    kinds: Asks = [
        {},
        {"stop_token_ids": [token_ids[middle]]},
        {"stop_strings": [text[middle : middle + 2] or "?"]},
        {"stop_strings": [text[middle : middle + 3] or "?"], "include_stop_str": True},
        {"stop_token_ids": [token_ids[0]], "min_tokens": middle},
    ]
    return {**ask, **kinds[number % len(kinds)]}


def _answers(rig, asks: Asks) -> list[Answer]:
    requests = rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    return [
        (r.token_ids[r.num_prompt :], rig.text(r), r.finish_reason, r.matched_stop)
        for r in requests
    ]


@pytest.mark.parametrize(
    ("family", "head", "batch"),
    [(family, head, 8) for family in ("llama", "qwen3") for head in HEADS]
    + [
        ("llama", "vanilla", 1),
        ("qwen3", "gated", 1),
        ("llama", "rnn", 1),
        ("qwen3", "useless", 1),
    ],
)
def test_drafted_equals_plain(plain, make_rig, tmp_path, family, head, batch) -> None:
    model, folder, asks, expected = plain(family)
    assert {answer[2] for answer in expected} >= {
        FinishReason.MAX_TOKENS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING
    }  # fmt: skip
    path = tiny_drafter(tmp_path, folder, block_size=5, **HEADS[head])
    drafter_model, _ = load_drafter(path, folder, torch.float32)
    drafter = LocalDrafter(drafter_model, 8, spoil_every=7 if batch == 8 else 0)
    rig = make_rig(
        model,
        Tokenizer(folder),
        drafter,
        max_drafts=5,
        taps=drafter_model.config.target_layer_ids,
        max_running=batch,
        max_batch_tokens=48,
        num_kv_blocks=60 if batch == 1 else 90,
    )
    requests = rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    for request, ask, (token_ids, text, reason, stop) in zip(requests, asks, expected, strict=True):
        assert request.token_ids[request.num_prompt :] == token_ids, ask
        assert (rig.text(request), request.finish_reason) == (text, reason), ask
        assert request.matched_stop == stop
    num_drafts = sum(r.counters.num_draft_tokens for r in requests)
    num_accepted = sum(r.counters.num_accepted_tokens for r in requests)
    assert 0 < num_accepted < num_drafts
    if head != "useless":
        assert num_accepted > 0.1 * num_drafts
    if batch == 8:
        assert drafter.num_spoiled > 50
    assert not drafter._sessions
