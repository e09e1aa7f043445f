"""The engine looking ahead, with the real client and the real drafter's engine between them.

Only the stream is missing: a link in this process carries the wire's messages, and lets the drafter
take them one by one, all at once when somebody waits, or any way between. Every draft that is used
must be what a drafter makes of the decided tokens' rows alone, in every mode of sampling.
"""

import queue
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.loading.tokenizer import Tokenizer
from common.models.contracts import contract_of
from common.models.deepseek_v4.drafter import load_deepseek_v4_drafter
from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.dspark_qwen3 import load_drafter
from common.models.interfaces import DraftModel, Target
from common.pb.v1 import drafter_pb2 as pb
from common.telemetry import Metric, Telemetry
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.tiny import tiny_drafter
from drafter_svc.batcher import Inbox, LinkOpened, RowForm
from drafter_svc.engine import DraftEngine, StepReply
from drafter_svc.sessions import Limits, SessionTable
from drafter_svc.wire import reply_to_pb, step_from_pb
from verifier_svc.draft_link import LinkSettings
from verifier_svc.draft_sync import Ask
from verifier_svc.drafter_client import DrafterClient, _ask_to_pb
from verifier_svc.drafting import Drafts, FeatureSource
from verifier_svc.request import FinishReason, Plan, SamplingMode

VOCAB, MAX_ROWS, KV_BLOCK = 64, 200, 16
RHYTHMS = {"eager": 1.0, "lazy": 0.0, "any": 0.5}  # how often a message is taken when it comes


def engine_of(model: DraftModel, num_blocks: int) -> DraftEngine:
    window = model.config.context_window
    limits = Limits(num_blocks, KV_BLOCK, model.config.block_size, 64, 64, 4000, window)
    made = DraftEngine(model, SessionTable(limits), model.new_kv(num_blocks, KV_BLOCK))
    made.run([LinkOpened(1)])
    return made


class Link:
    """A `DraftLink` and its inbox, with the drafter at the other end, on the caller's thread."""

    lost, answering = False, True

    def __init__(self, model: DraftModel, eagerness: float, num_blocks: int) -> None:
        self.welcome = pb.Welcome(max_sessions=64, max_step_rows=MAX_ROWS, max_context_len=4000)
        self.form = RowForm(False, "fp32", model.config.feature_width)
        self.inbox, self.statuses = self, Counter[int]()
        self._engine, self._up, self._num_up = engine_of(model, num_blocks), Inbox(), 0
        self._down = queue.SimpleQueue[pb.DraftResponse]()
        self._eagerness, self._random = eagerness, random.Random(3)

    def send(self, message: pb.DraftRequest) -> None:
        self._up.put(step_from_pb(message.step, 1, self.form, max_entries=64, max_rows=MAX_ROWS))
        self._num_up += 1
        if self._random.random() < self._eagerness:
            self._pump()

    def probe(self, delay_s: float) -> None:
        raise AssertionError("nothing is ever late here")

    def qsize(self) -> int:
        return self._down.qsize()

    def get_nowait(self) -> pb.DraftResponse:
        return self._down.get_nowait()

    def get(self, timeout: float) -> pb.DraftResponse:
        while self._down.empty():
            assert self._num_up, "the verifier waits for an answer to nothing"
            self._pump()
        return self._down.get()

    def _pump(self) -> None:
        """One batch: of what waits, the first part or all; the rest is newer work."""
        work = self._up.take()
        count = self._random.randint(1, len(work)) if 0 < self._eagerness < 1 else len(work)
        for later in work[count:]:
            self._up.put(later)
        self._num_up -= count
        for reply in self._engine.run(work[:count], self._up.supersedes):
            assert isinstance(reply, StepReply)
            message = reply_to_pb(reply)
            if message is not None:
                self.statuses.update(p.status for p in message.proposals.proposals)
                self._down.put(message)
        self._engine.catch_up()


class Counts(Telemetry):
    """Remembers what was recorded."""

    of: Counter[str]

    @property
    def counts(self) -> bool:
        return True

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        self.of[".".join([metric.name.removeprefix("dspark."), *labels.values()])] += int(value)


class Checked(DrafterClient):
    """The client; whatever it proposes is compared with what the decided rows alone lead to."""

    def __init__(
        self,
        model: DraftModel,
        target: Target,
        eagerness: float,
        *,
        ahead: bool = True,
        num_blocks: int = 200,
    ) -> None:
        self.counts, self.num_checked = Counts(), 0
        self.counts.of = Counter()
        settings = LinkSettings("unix:/nowhere", feature_dtype="fp32", look_ahead=ahead)
        super().__init__(settings, contract_of(model.config, target.config), self.counts)
        self.link = Link(model, eagerness, num_blocks)
        self._connector.link = self.link  # type: ignore[assignment]
        self._model = model

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        drafts = super().propose(plan, features)
        self._check(plan, drafts, features)
        return drafts

    def _check(self, plan: Plan, drafts: Drafts, features: FeatureSource) -> None:
        window = self._model.config.context_window
        asks = []
        for entry in plan.entries:
            if drafts.of(entry.request) is not None:
                first = max(0, entry.start - window) if window else 0
                anchor_id, num_drafts = entry.request.token_ids[-1], self._model.config.block_size
                num_rows = entry.start - first
                asks.append(Ask(entry.request, 1, first, first, num_rows, num_drafts, anchor_id))
        if not asks:
            return
        rows = features.read([(a.request, a.base_len, a.anchor_position) for a in asks])
        entries = [_ask_to_pb(ask, self._settings.top_k) for ask in asks]
        step = pb.Step(step_id=1, entries=entries, rows=rows)
        work = step_from_pb(step, 1, self.link.form, max_entries=64, max_rows=10_000)
        (reply,) = engine_of(self._model, 100).run([work])
        assert isinstance(reply, StepReply)
        for ask, want in zip(asks, reply.proposals, strict=True):
            got = drafts.by_session[ask.request.session_id]
            count = len(got.token_ids)
            assert want.token_ids is not None and count
            assert got.token_ids == tuple(want.token_ids[:count].tolist())
            assert (got.candidate_probs is None) == (want.candidate_probs is None)
            if got.candidate_probs is not None and want.candidate_probs is not None:
                np.testing.assert_array_equal(got.candidate_ids, want.candidate_ids[:count])
                np.testing.assert_allclose(
                    got.candidate_probs, want.candidate_probs[:count], atol=1e-4
                )
            self.num_checked += 1


Pair = tuple[Target, DraftModel, Tokenizer | None]


@pytest.fixture(scope="module")
def pairs(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """`pairs(name)`: a target, a drafter of it, and the target's tokenizer."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp("pair")
            if name == "v4":
                path = tiny_deepseek_v4(folder, compress_rate_hca=KV_BLOCK)
                drafter = load_deepseek_v4_drafter(path, torch.float32)[0]
                made[name] = load_deepseek_v4(path, torch.float32)[0], drafter, None
            else:
                sizes = {"layers": 3, "noise": 0.5}
                if name == "invariant":  # in bf16
                    sizes |= {"family": "qwen3", "numerics": "batch_invariant"}
                target, path = tiny_models(**sizes)
                draft = tiny_drafter(folder, path)
                made[name] = target, load_drafter(draft, path, torch.float32)[0], Tokenizer(path)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def guesses_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely they are right."""
    monkeypatch.setattr("verifier_svc.foresight.LEAST_RIGHT", 0.0)


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(vocab - 2) for _ in range(draw.choice([1, 3, 9, 40]))] for _ in range(count)
    ]


def run(make_rig, pair: Pair, asks: Sequence[dict], client: Checked | None, **sizes: int):
    target, drafter, tokenizer = pair
    config = drafter.config
    sizes = {"max_running": 8, "max_batch_tokens": 48, "kv_block_size": KV_BLOCK, **sizes}
    drafted = {"max_drafts": config.block_size, "taps": config.target_layer_ids} if client else {}
    rig = make_rig(target, tokenizer, client, **drafted, **sizes)
    return rig, rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])


def check_ahead(client: Checked) -> None:
    """Both kinds of guesses happened, and nothing was ever refused or sent twice over."""
    counts = client.counts.of
    assert counts["asked_ahead.used"] > 0 and counts["asked_ahead.in_vain"] > 0, counts
    assert not counts["bad_proposals"] and not sum(
        count for name, count in counts.items() if name.startswith("draft_late")
    )
    assert set(client.link.statuses) == {pb.Proposal.STATUS_OK}
    assert client.num_checked > 20


def with_stops(make_rig, pair: Pair, asks: list[dict]) -> list[dict]:
    """A stop that really comes, somewhere in the answer of most requests."""
    rig, requests = run(make_rig, pair, asks, None)
    found = []
    for number, (ask, request) in enumerate(zip(asks, requests, strict=True)):
        middle, text = request.num_output // 2, rig.text(request)
        kinds = [
            {},
            {"stop_token_ids": [request.token_ids[request.num_prompt + middle]]},
            {"stop_strings": [text[middle : middle + 2] or "?"]},
        ]
        found.append({**ask, **kinds[number % 3 if pair[2] else number % 2]})
    return found


@pytest.mark.parametrize(
    ("name", "rhythm", "batch", "mode"),
    [
        ("dense", "eager", 1, "greedy"),
        ("dense", "lazy", 8, "greedy"),
        ("dense", "any", 8, "greedy"),
        ("dense", "any", 8, "coupled"),
        ("dense", "lazy", 1, "coupled"),
        ("invariant", "any", 8, "coupled"),
        ("v4", "any", 8, "greedy"),
    ],
)
def test_ids_and_texts_are_those_of_plain_decoding(
    make_rig, pairs, name: str, rhythm: str, batch: int, mode: str
) -> None:
    pair = pairs(name)
    sampling = {"temperature": 0.0}
    if mode == "coupled":
        sampling = {"temperature": 1.0, "mode": SamplingMode.COUPLED, "seed": 9}
    asks = [
        {"prompt_ids": ids, "max_tokens": 40, "max_draft_tokens": 1 + i % 4, **sampling}
        for i, ids in enumerate(prompts(18, pair[0].config.vocab_size))
    ]
    asks = with_stops(make_rig, pair, asks)
    plain_rig, plain = run(make_rig, pair, asks, None)
    client = Checked(pair[1], pair[0], RHYTHMS[rhythm])
    sizes = {"num_kv_blocks": 12} if batch == 8 and name == "dense" else {}
    rig, drafted = run(make_rig, pair, asks, client, max_running=batch, **sizes)
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert plain_rig.text(one) == rig.text(other)
        assert one.finish_reason is other.finish_reason
    reasons = {request.finish_reason for request in drafted}
    assert reasons >= {FinishReason.MAX_TOKENS, FinishReason.STOP_TOKEN}
    assert (rig.scheduler.num_preemptions > 0) == bool(sizes)
    check_ahead(client)
    assert sum(r.counters.num_accepted_tokens for r in drafted) > 0


def test_rejection_sampling_gets_the_drafts_of_the_decided_anchor(make_rig, pairs) -> None:
    pair = pairs("dense")
    client = Checked(pair[1], pair[0], RHYTHMS["any"])
    asks = [
        {"prompt_ids": ids, "max_tokens": 30, "temperature": 1.0, "seed": i, "ignore_eos": True}
        for i, ids in enumerate(prompts(8, VOCAB, 2))
    ]
    _, requests = run(make_rig, pair, asks, client)
    check_ahead(client)
    counters = [request.counters for request in requests]
    accepted = sum(c.num_accepted_tokens for c in counters)
    assert 0 < accepted < sum(c.num_draft_tokens for c in counters)


def test_a_drafter_without_room_for_all_costs_drafts_only(make_rig, pairs) -> None:
    pair = pairs("dense")
    asks = [
        {"prompt_ids": ids, "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        for ids in prompts(8, VOCAB, 5)
    ]
    _, plain = run(make_rig, pair, asks, None)
    client = Checked(pair[1], pair[0], RHYTHMS["any"], num_blocks=13)
    _, drafted = run(make_rig, pair, asks, client)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    statuses = set(client.link.statuses)
    assert statuses >= {pb.Proposal.STATUS_OK, pb.Proposal.STATUS_NO_ROOM}
    assert statuses <= {
        pb.Proposal.STATUS_OK, pb.Proposal.STATUS_NO_ROOM, pb.Proposal.STATUS_UNKNOWN_SESSION
    }  # fmt: skip
    assert client.num_checked > 20


def test_a_right_guess_spares_a_message_and_no_row_goes_twice(make_rig, pairs) -> None:
    pair = pairs("dense")
    ask = {"prompt_ids": [1, 2, 3], "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    sent = []
    for ahead in (False, True):
        client = Checked(pair[1], pair[0], RHYTHMS["eager"], ahead=ahead)
        _, [request] = run(make_rig, pair, [ask], client)
        sent.append(client.counts.of["feature_bytes"] / 4 / client.link.form.width)
    assert sent[0] <= len(request.token_ids)
    counters = request.counters
    assert sent[1] <= sent[0] + counters.num_draft_tokens


FORBIDDING = {
    "stop ids": {"min_tokens": 16, "stop_token_ids": list(range(VOCAB // 3))},
    "bias": {"logit_bias": dict.fromkeys(range(VOCAB // 3), -100.0)},
}


@pytest.mark.parametrize("forbids", FORBIDDING)
def test_a_request_that_may_emit_no_likely_id_is_guessed_harmlessly(
    make_rig, pairs, forbids: str
) -> None:
    pair = pairs("dense")
    base = {"prompt_ids": [40, 41], "max_tokens": 16, **FORBIDDING[forbids]}
    modes = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "mode": SamplingMode.COUPLED, "seed": 1, "logprobs": 2},
        {"temperature": 1.0, "mode": SamplingMode.COUPLED, "seed": 2, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1e-4, "mode": SamplingMode.COUPLED, "seed": 3, "top_k": 3},
    ]
    rejection = [{"temperature": t, "seed": 4, "top_k": 5, "top_p": 0.9} for t in (1.0, 1e-4)]
    asks = [{**base, **mode} for mode in [*modes, *rejection]]
    _, plain = run(make_rig, pair, asks, None)
    client = Checked(pair[1], pair[0], RHYTHMS["any"])
    _, drafted = run(make_rig, pair, asks, client)
    for one, other in list(zip(plain, drafted, strict=True))[: len(modes)]:
        assert one.token_ids == other.token_ids
    for request in drafted:
        assert min(request.token_ids[2:]) >= VOCAB // 3
    assert client.counts.of["asked_ahead.in_vain"] > 20
    assert not client.counts.of["bad_proposals"]
