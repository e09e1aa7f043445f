"""The engine on real tiny models: what a request gets, whatever is drafted or runs beside it."""

import random
from collections.abc import Callable

import pytest
import torch

from common.loading.tokenizer import Tokenizer
from common.nn.attention import AttentionBatch, Segment
from verifier_svc.drafting import Draft, Drafts, FeatureSource, NoDrafter
from verifier_svc.events import Delta
from verifier_svc.request import FinishReason, Plan, Request, SamplingMode

VOCAB = 64  # of the tiny models


class Oracle(NoDrafter):
    """A drafter that knows what plain decoding answers and spoils it as told.

    `spoil(request, right, max_drafts, step)` returns the draft, or None for none in time.
    """

    def __init__(self, spoil: Callable[[Request, list[int], int, int], Draft | None]) -> None:
        self.answers: dict[str, list[int]] = {}
        self.released: list[Request] = []
        self.num_proposed = 0
        self._spoil = spoil

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        drafts = {}
        for entry in plan.entries:
            request = entry.request
            if entry.max_drafts:
                right = self.answers[request.request_id][len(request.token_ids) :]
                draft = self._spoil(request, right, entry.max_drafts, plan.step_id)
                if draft is not None:
                    drafts[request.session_id] = draft
                    self.num_proposed += len(draft.token_ids)
        return Drafts(drafts)

    def release(self, request: Request) -> None:
        self.released.append(request)

    def close(self) -> None:
        pass


def _shuffled(request: Request, right: list[int], n: int, step: int) -> Draft:
    generator = random.Random(step * 100 + request.session_id)
    return Draft(tuple(generator.randrange(VOCAB) for _ in range(n)))


SPOILERS: dict[str, Callable[[Request, list[int], int, int], Draft | None]] = {
    "good": lambda request, right, n, step: Draft(tuple(right[:n])),
    "random": _shuffled,
    "adversarial": lambda request, right, n, step: Draft(tuple((t + 1) % VOCAB for t in right[:n])),
    "wrong_at": lambda request, right, n, step: Draft(
        tuple((t + (i == step % n)) % VOCAB for i, t in enumerate(right[:n]))
    ),
    "partial": lambda request, right, n, step: Draft(tuple(right[: step % (n + 1)])),
    "missing": lambda request, right, n, step: Draft(tuple(right[:n])) if step % 3 else None,
    "oversized": lambda request, right, n, step: Draft(tuple([*right, *range(20)][: n + 9])),
}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB - 2) for _ in range(generator.randrange(1, 20))]
        for _ in range(count)
    ]


def both(make_rig, model, spoil: str, asks: list[dict], tokenizer=None, **sizes):
    """Runs `asks` plainly and drafted; returns both rigs and both lists of requests."""
    sizes.setdefault("max_running", len(asks))
    plain_rig = make_rig(model, tokenizer, **sizes)
    plain = plain_rig.run([plain_rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    oracle = Oracle(SPOILERS[spoil])
    rig = make_rig(model, tokenizer, oracle, max_drafts=4, **sizes)
    oracle.answers = {r.request_id: r.token_ids + [0] * 30 for r in plain}
    drafted = rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    assert oracle.num_proposed > 0
    assert set(oracle.released) >= set(drafted)
    return plain_rig, rig, plain, drafted


def num_accepted(requests: list[Request]) -> int:
    return sum(request.counters.num_accepted_tokens for request in requests)


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_ids_do_not_depend_on_the_drafter(make_rig, tiny_models, spoil, batch) -> None:
    model, folder = tiny_models("qwen3" if batch == 8 else "llama")
    asks = [{"prompt_ids": p, "temperature": 0.0, "max_tokens": 24} for p in prompts(batch)]
    plain_rig, rig, plain, drafted = both(make_rig, model, spoil, asks, Tokenizer(folder))
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert plain_rig.text(one) == rig.text(other)
        assert one.finish_reason is other.finish_reason
    accepted = num_accepted(drafted)
    assert accepted == 0 if spoil == "adversarial" else spoil == "random" or accepted > 0
    if spoil == "good":
        rounds = sum(r.counters.num_rounds for r in drafted)
        assert rounds * 4 < sum(r.num_output for r in drafted)
    fallbacks = sum(r.counters.num_fallback_rounds for r in drafted)
    assert (fallbacks > 0) == (spoil == "missing")


@pytest.mark.parametrize(
    "extras",
    [
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 10, "logit_bias": {63: 9.0, 5: 4.0}},
        {"temperature": 0.9, "top_k": 8, "presence_penalty": 0.6, "mode": "coupled", "seed": 3},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "mode": "coupled", "seed": 4},
        {
            "temperature": 1.0,
            "seed": 5,
            "frequency_penalty": 0.4,
        },  # one-hot drafts: also a function
    ],
)
def test_extras_are_applied_at_every_place_of_a_block(make_rig, tiny_models, extras) -> None:
    extras = {**extras, "mode": SamplingMode(extras.get("mode", "rejection"))}
    model, _ = tiny_models()
    asks = [{"prompt_ids": p, "max_tokens": 24, "logprobs": 2, **extras} for p in prompts(4, 1)]
    plain_rig, rig, plain, drafted = both(make_rig, model, "wrong_at", asks)
    assert num_accepted(drafted) > 0
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        expected, got = (
            [entry for e in r.of(q) if isinstance(e, Delta) for entry in e.logprobs]
            for r, q in ((plain_rig, one), (rig, other))
        )
        assert len(got) == other.num_output
        for a, b in zip(expected, got, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4) and a.top_ids == b.top_ids


def test_a_drafter_cannot_have_worked_longer_than_it_was_waited_for(make_rig, tiny_models) -> None:
    class Boaster(Oracle):
        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            drafts = super().propose(plan, features)
            drafts.drafter_s = 3 * (2**32 - 1) / 1e6  # the most that fits on the wire
            return drafts

    model, _ = tiny_models()
    oracle = Boaster(SPOILERS["random"])
    oracle.answers = {"r": [0] * 40}
    rig = make_rig(model, None, oracle, max_drafts=4)
    [request] = rig.run([rig.ask("r", [1, 2, 3], temperature=0.0, max_tokens=9)])
    assert 0 < request.times.drafter <= request.times.draft_wait


@pytest.mark.parametrize("batch", [1, 8])
def test_stops_fall_where_plain_decoding_puts_them(make_rig, tiny_models, batch) -> None:
    """Every kind of stop, at every place of a block, in one batch after another."""
    model, folder = tiny_models()
    tokenizer = Tokenizer(folder)
    rig = make_rig(model, tokenizer)
    [long] = rig.run([rig.ask("long", [1, 2, 3], temperature=0.0, max_tokens=30)])
    text, ids = rig.text(long), long.token_ids[3:]
    asks = []
    for at in range(1, 12):
        asks += [
            {"stop_token_ids": [ids[at]]},
            {"stop_strings": [text[at : at + 2]]},
            {"stop_strings": [text[at : at + 3]], "include_stop_str": True},
            {"max_tokens": at},
            {"stop_token_ids": [ids[at]], "min_tokens": at + 3},
            {"stop_strings": [text[at : at + 2], text[at + 1 : at + 5]], "min_tokens": at},
        ]
    base = {"prompt_ids": [1, 2, 3], "temperature": 0.0, "max_tokens": 30}
    asks = [{**base, **ask} for ask in asks]
    sizes = {"max_running": batch, "max_batch_tokens": 64}
    plain_rig, rig, plain, drafted = both(make_rig, model, "good", asks, tokenizer, **sizes)
    reasons = set()
    for one, other, ask in zip(plain, drafted, asks, strict=True):
        assert one.token_ids == other.token_ids, ask
        assert plain_rig.text(one) == rig.text(other), ask
        a, b = plain_rig.finished(one), rig.finished(other)
        assert (a.reason, a.matched_stop, a.matched_token_id) == (
            b.reason, b.matched_stop, b.matched_token_id
        )  # fmt: skip
        reasons.add(b.reason)
        if b.reason is FinishReason.STOP_STRING:
            assert (b.matched_stop in rig.text(other)) == ask.get("include_stop_str", False)
        if b.reason is FinishReason.STOP_TOKEN:
            assert other.token_ids[-1] == b.matched_token_id in ask["stop_token_ids"]
        assert other.num_output > ask.get("min_tokens", 0) or b.reason is FinishReason.MAX_TOKENS
    assert {FinishReason.STOP_TOKEN, FinishReason.STOP_STRING, FinishReason.MAX_TOKENS} <= reasons
    assert num_accepted(drafted) > 0


def test_eos_is_emitted_without_text_unless_it_is_ignored(make_rig, tiny_models) -> None:
    model, folder = tiny_models()
    rig = make_rig(model, Tokenizer(folder))
    ask = {"prompt_ids": [4, 5], "temperature": 0.0, "max_tokens": 9, "logit_bias": {63: 100.0}}
    ended, ignored, later = rig.run([
        rig.ask("a", **ask), rig.ask("b", ignore_eos=True, **ask), rig.ask("c", min_tokens=3, **ask)
    ])  # fmt: skip
    assert (ended.finish_reason, ended.token_ids[2:]) == (FinishReason.EOS, [63])
    assert rig.finished(ended).matched_token_id == 63 and rig.text(ended) == ""
    assert ignored.token_ids[2:] == [63] * 9 and ignored.finish_reason is FinishReason.MAX_TOKENS
    assert later.token_ids[5:] == [63] and 63 not in later.token_ids[:5]


def test_the_context_ends_a_request(make_rig, tiny_models) -> None:
    model, _ = tiny_models(max_len=32)
    prompt = list(range(20))
    asks = [{"prompt_ids": prompt, "temperature": 0.0}]
    for spoil in ("good", "oversized"):
        _, _, [one], [other] = both(make_rig, model, spoil, asks)
        assert len(one.token_ids) == 32 and one.finish_reason is FinishReason.CONTEXT_FULL
        assert other.token_ids == one.token_ids


@pytest.mark.parametrize("max_batch_tokens", [8, 11, 64])
def test_prefill_in_chunks_beside_decoding(make_rig, tiny_models, max_batch_tokens) -> None:
    model, _ = tiny_models("qwen3")
    generator = random.Random(4)
    lengths = [1, 40, 3, 25, 60, 2, 17, 8]
    asks = [
        {
            "prompt_ids": [generator.randrange(60) for _ in range(n)],
            "temperature": 0.0,
            "max_tokens": 9,
        }
        for n in lengths
    ]
    whole = make_rig(model, max_batch_tokens=512)
    expected = whole.run([whole.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    sizes = {"max_batch_tokens": max_batch_tokens}
    _, _, plain, drafted = both(make_rig, model, "wrong_at", asks, **sizes)
    for one, two, three in zip(expected, plain, drafted, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids


def test_preempted_requests_answer_the_same(make_rig, tiny_models) -> None:
    model, _ = tiny_models()
    asks = [{"prompt_ids": p, "temperature": 0.0, "max_tokens": 30} for p in prompts(6, 7)]
    roomy = make_rig(model)
    expected = roomy.run([roomy.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    _, rig, plain, drafted = both(make_rig, model, "wrong_at", asks, num_kv_blocks=24)
    assert rig.scheduler.num_preemptions > 0
    for one, two, three in zip(expected, plain, drafted, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_ids_are_equal_where_rows_do_not_depend_on_company(
    make_rig, tiny_models, family
) -> None:
    model, _ = tiny_models(family, "batch_invariant", vocab=VOCAB, noise=1.0, sharpness=1.0)
    asks = [
        {"prompt_ids": p, "temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
        for p in prompts(8, 11)
    ]
    alone = make_rig(model, max_running=1)
    expected = alone.run([alone.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    sizes = {"max_batch_tokens": 20, "num_kv_blocks": 24}
    _, rig, plain, drafted = both(make_rig, model, "wrong_at", asks, **sizes)
    assert rig.scheduler.num_preemptions > 0 and num_accepted(drafted) > 0
    for one, two, three in zip(expected, plain, drafted, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids


def test_abort_between_steps_frees_everything(make_rig, tiny_models) -> None:
    model, folder = tiny_models()
    oracle = Oracle(SPOILERS["random"])
    rig = make_rig(model, Tokenizer(folder), oracle, max_drafts=3, max_running=2)
    requests = [rig.ask(f"r{i}", [i + 1] * 9, temperature=0.0, max_tokens=50) for i in range(3)]
    oracle.answers = {r.request_id: [] for r in requests}
    for request in requests:
        rig.scheduler.add(request)
    for _ in range(3):
        rig.events += rig.engine.step()
    for request in requests:
        rig.events.append(rig.scheduler.abort(request))
    assert rig.scheduler.kv_blocks.num_free == rig.scheduler.kv_blocks.num_blocks
    assert not rig.scheduler.has_work and oracle.released == requests
    for request in requests:
        rig.check_stream(request)
        assert rig.finished(request).reason is FinishReason.ABORT


def test_feature_rows_are_the_taps_of_the_tokens_that_were_kept(make_rig, tiny_models) -> None:
    """After drafts, rejections, chunks and preemption every row still belongs to its own token."""
    model, _ = tiny_models(layers=3)
    taps = (-1, 0, 1)
    checked = 0

    class Checks(Oracle):
        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            nonlocal checked
            live = [entry.request for entry in plan.entries if entry.request.num_computed > 2]
            data = features.read([(r, 1, r.num_computed) for r in live])
            rows = torch.frombuffer(bytearray(data), dtype=torch.float32) if live else None
            for request in live:
                num_rows = request.num_computed - 1
                own, rows = rows[: num_rows * 96].view(num_rows, 96), rows[num_rows * 96 :]
                torch.testing.assert_close(own, fresh_taps(request)[1:], rtol=1e-4, atol=1e-4)
                checked += num_rows
            return super().propose(plan, features)

    def fresh_taps(request: Request) -> torch.Tensor:
        token_ids = request.token_ids[: request.num_computed]
        n = len(token_ids)
        kv = model.new_kv(1, n)
        batch = AttentionBatch([Segment(0, n, n, [0])], torch.arange(n), torch.arange(n))
        rows = model.forward(torch.tensor(token_ids), kv, batch, taps)[1]
        assert rows is not None
        return rows

    plain_rig = make_rig(model)
    asks = [{"prompt_ids": p, "temperature": 0.0, "max_tokens": 12} for p in prompts(4, 9)]
    plain = plain_rig.run([plain_rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    oracle = Checks(SPOILERS["wrong_at"])
    oracle.answers = {r.request_id: r.token_ids + [0] * 9 for r in plain}
    rig = make_rig(
        model, None, oracle, max_drafts=4, taps=taps, max_batch_tokens=16, num_kv_blocks=14
    )
    drafted = rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]
    assert checked > 300 and rig.scheduler.num_preemptions > 0


def test_a_request_for_no_drafts_gets_none(make_rig, tiny_models) -> None:
    model, _ = tiny_models()
    base = {"prompt_ids": [1, 2], "temperature": 0.0, "max_tokens": 12}
    asks = [{"speculation_enabled": False}, {"max_draft_tokens": 0}, {"max_draft_tokens": 1}, {}]
    _, _, _, drafted = both(make_rig, model, "good", [{**base, **ask} for ask in asks])
    off, none, one, free = [request.counters for request in drafted]
    assert off.num_draft_tokens == none.num_draft_tokens == 0
    assert off.num_fallback_rounds == none.num_fallback_rounds == 0
    assert one.num_draft_tokens == one.num_drafted_rounds > 0
    assert free.num_draft_tokens > one.num_draft_tokens
    assert free.accepted_by_position[0] == free.num_drafted_rounds


def test_times_add_up(make_rig, tiny_models) -> None:
    model, _ = tiny_models()
    rig = make_rig(model)
    [request] = rig.run([rig.ask("a", [1, 2, 3], temperature=0.0, max_tokens=9)])
    times = request.times
    assert times.arrived <= times.scheduled <= times.first_token <= times.finished
    parts = times.draft_wait + times.forward + times.verify
    assert 0 < parts <= times.round <= times.finished - times.first_token + 0.1
    assert request.counters.num_rounds == 8
