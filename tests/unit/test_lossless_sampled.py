"""Temperature > 0: the first three tokens follow the target's exact law, through the whole engine.

20,000 runs per case on a real model with eight tokens, whose law is enumerated over all
continuations by a straight float64 reference. Every other run has a good drafter, the rest one that
prefers what the target avoids. COUPLED must also give the same ids with every drafter, with none,
and with one that dies.
"""

import gc
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from common.models.dense import DenseTarget
from common.nn.attention import AttentionBatch, Segment
from verifier_svc.drafting import Draft, Drafts, FeatureSource, NoDrafter
from verifier_svc.request import Outlook, Plan, Request, SamplingMode

VOCAB, NUM_TOKENS, NUM_RUNS = 8, 3, 20_000
EOS = VOCAB - 1
Law = dict[tuple[int, ...], np.ndarray]  # context after the prompt -> next token's distribution
PROMPT = [1, 4, 1, 2]
PASSES, FAILS = 1e-3, 1e-9  # p-values; everything here is deterministic
CASES: dict[str, dict[str, object]] = {
    "top_k_top_p": {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
    "penalties": {
        "temperature": 1.1, "repetition_penalty": 1.3, "frequency_penalty": 0.6,
        "presence_penalty": 0.3, "logit_bias": {3: 0.8}, "min_p": 0.02, "min_tokens": 1,
        "stop_token_ids": [],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_models) -> DenseTarget:
    """Broad laws: its layers add as much as the last token does."""
    return tiny_models(
        "llama", vocab=VOCAB, layers=1, hidden=16, heads=2, kv_heads=1, sharpness=1.5, noise=1.0
    )[0]


def raw_logits(model: DenseTarget, contexts: list[tuple[int, ...]]) -> np.ndarray:
    """[contexts, VOCAB] float64: after PROMPT and each context, all of one length."""
    rows = []
    for context in contexts:
        token_ids = [*PROMPT, *context]
        n = len(token_ids)
        batch = AttentionBatch([Segment(0, n, n, [0])], torch.arange(n), torch.arange(n))
        hidden, _ = model.forward(torch.tensor(token_ids), model.new_kv(1, n), batch)
        rows.append(model.logits(hidden[-1:])[0].double().numpy())
    return np.array(rows)


def law_after(logits: np.ndarray, context: tuple[int, ...], asked: dict) -> np.ndarray:
    """The distribution that a client asked for, straight from the documented rules."""
    row = logits.copy()
    for token, bias in asked.get("logit_bias", {}).items():
        row[token] += bias
    if len(context) < asked.get("min_tokens", 0):
        row[EOS] = -math.inf
    for token in {*PROMPT, *context}:
        factor = asked.get("repetition_penalty", 1.0)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(context):
        row[token] -= asked.get("frequency_penalty", 0.0) * context.count(token)
        row[token] -= asked.get("presence_penalty", 0.0)
    row = row / asked["temperature"]
    row[np.exp(row - row.max()) < asked.get("min_p", 0.0)] = -math.inf
    if top_k := asked.get("top_k"):
        row[row < np.sort(row)[-top_k]] = -math.inf
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    needed = int(np.searchsorted(probs[order].cumsum(), asked.get("top_p", 1.0))) + 1
    probs[order[needed:]] = 0.0
    return probs / probs.sum()


@pytest.fixture(scope="module")
def law(model) -> Callable[[str], Law]:
    """`law(case)`: the next token's distribution after every context of up to two tokens."""
    contexts = [c for n in range(NUM_TOKENS) for c in itertools.product(range(VOCAB), repeat=n)]
    raw = dict(zip(contexts, raw_logits(model, contexts), strict=True))

    def get(case: str) -> Law:
        return {context: law_after(raw[context], context, CASES[case]) for context in contexts}

    return get


class Sampler(NoDrafter):
    """Drafts two tokens from a table of distributions by last token; sends these or tokens only.

    Several tables take turns by session. `dies_at`: from that step on nothing comes any more.
    """

    def __init__(
        self, *tables: np.ndarray, top_k: int = 5, one_hot: bool = False, dies_at: int = 0
    ) -> None:
        stacked = np.stack(tables)  # [tables, last token, next token]
        self.ids = np.argsort(-stacked, axis=2)[:, :, :top_k]
        kept = np.take_along_axis(stacked, self.ids, 2)
        self.probs = (kept / kept.sum(2, keepdims=True)).astype(np.float32)
        self.sampled = self.probs  # what tokens are really drawn from
        self._one_hot, self._dies_at = one_hot, dies_at
        self._rng = np.random.default_rng(11)

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        wanting = [entry for entry in plan.entries if entry.max_drafts]
        if not wanting or (self._dies_at and plan.step_id >= self._dies_at):
            return Drafts()
        drafts = self._draw([(e.request.session_id, e.request.token_ids[-1]) for e in wanting])
        return Drafts({
            entry.request.session_id: draft.truncated(entry.max_drafts)
            for entry, draft in zip(wanting, drafts, strict=True)
        })  # fmt: skip

    def _draw(self, after: list[tuple[int, int]]) -> list[Draft]:
        """after: session id and last token of each draft."""
        session_ids, previous = np.array(after).T
        table = session_ids % len(self.ids)
        ids, probs, tokens = [], [], []
        for _ in range(2):
            ids.append(self.ids[table, previous])
            probs.append(self.probs[table, previous])
            running = self.sampled[table, previous].cumsum(1, dtype=np.float64)
            uniforms = self._rng.random((len(previous), 1)) * running[:, -1:]
            previous = ids[-1][np.arange(len(previous)), (running <= uniforms).sum(1)]
            tokens.append(previous)
        parts = zip(np.stack(tokens, 1).tolist(), np.stack(ids, 1), np.stack(probs, 1), strict=True)
        return [
            Draft(tuple(t)) if self._one_hot else Draft(tuple(t), (), i, p) for t, i, p in parts
        ]

    def release(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


class EarlySampler(Sampler):
    """Draws when the anchor is guessed, as a drafter that is told ahead; anew if it was wrong."""

    may_look_ahead = True

    def __init__(self, *tables: np.ndarray) -> None:
        super().__init__(*tables)
        self.early: dict[int, tuple[int, int | None, Draft]] = {}
        self.guesses = {True: 0, False: 0}  # by whether they were right

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        told = [outlook for outlook in outlooks if outlook.anchor_id is not None]
        after = [(o.request.session_id, o.anchor_id or 0) for o in told]
        for outlook, draft in zip(told, self._draw(after) if told else (), strict=True):
            place = (outlook.start, outlook.anchor_id)
            self.early[outlook.request.session_id] = (*place, draft)

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        drafts = super().propose(plan, features)
        for entry in plan.entries:
            start, anchor_id, draft = self.early.pop(entry.request.session_id, (-1, None, None))
            if draft is not None and entry.max_drafts:
                right = (start, anchor_id) == (entry.start, entry.request.token_ids[-1])
                self.guesses[right] += 1
                if right:
                    found = draft.truncated(entry.max_drafts)
                    drafts.by_session[entry.request.session_id] = found
        return drafts


def good_table(law: Law) -> np.ndarray:
    """By last token: the mean of what the target does, flattened a little."""
    rows = [np.mean([p for c, p in law.items() if c and c[-1] == t], axis=0) for t in range(VOCAB)]
    return np.array(rows) ** 0.8 + 0.01


def bad_table(law: Law) -> np.ndarray:
    """Most mass where the target has least, much of it where the target has none."""
    return 1.0 / (good_table(law) + 0.02)


@pytest.fixture
def no_gc():
    """Collections over 20,000 live requests would take most of the time."""
    gc.disable()
    yield
    gc.enable()


def run(make_rig, model, asked: dict, drafter, num_runs: int = NUM_RUNS) -> list[Request]:
    rig = make_rig(
        model,
        None,
        drafter,
        max_drafts=2 if drafter else 0,
        max_running=400,
        max_batch_tokens=2_000,
        num_kv_blocks=450,
        kv_block_size=8,
    )
    rig.check_stream = lambda request: None  # would scan all events for every request
    asked = {"max_tokens": NUM_TOKENS + 1, "ignore_eos": "min_tokens" not in asked, **asked}
    return rig.run([rig.ask(f"r{i}", PROMPT, seed=i * 7919, **asked) for i in range(num_runs)])


def p_value(requests: list[Request], law: Law, eos_ends: bool) -> float:
    """Chi-square of the joint law of the first three tokens; 0 if something impossible came out."""
    expected: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        chance, length = 1.0, 0
        while length < NUM_TOKENS and not (eos_ends and length and tokens[length - 1] == EOS):
            chance *= law[tokens[:length]][tokens[length]]
            length += 1
        expected[tokens[:length]] = chance
    seen = dict.fromkeys(expected, 0)
    for request in requests:
        tokens = tuple(request.token_ids[len(PROMPT) :][:NUM_TOKENS])
        if not expected[tokens]:
            return 0.0
        seen[tokens] += 1
    chances = np.array(list(expected.values()))
    assert abs(chances.sum() - 1) < 1e-9
    counts, means = np.array(list(seen.values())), chances * len(requests)
    small = means < 5
    counts = np.append(counts[~small], counts[small].sum())
    means = np.append(means[~small], means[small].sum())
    keep = means > 0
    return float(stats.chisquare(counts[keep], means[keep]).pvalue)


def acceptance(requests: list[Request]) -> float:
    counters = [request.counters for request in requests]
    num_drafts = sum(c.num_draft_tokens for c in counters)
    assert num_drafts > len(requests) / 2
    return sum(c.num_accepted_tokens for c in counters) / num_drafts


@pytest.mark.slow
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", SamplingMode)
def test_the_law_of_the_first_three_tokens(make_rig, model, law, mode, case) -> None:
    exact, asked = law(case), {**CASES[case], "mode": mode}
    requests = run(make_rig, model, asked, Sampler(bad_table(exact), good_table(exact)))
    bad, good = ([r for r in requests if r.session_id % 2 == turn] for turn in (0, 1))
    for part in (requests, bad, good):
        assert p_value(part, exact, "min_tokens" in asked) > PASSES
    assert 0.01 < acceptance(bad) < acceptance(good) < 0.95
    assert acceptance(good) > 0.1


@pytest.mark.usefixtures("no_gc")
def test_power_a_drafter_that_lies_about_its_distribution_fails(make_rig, model, law) -> None:
    exact = law("top_k_top_p")
    drafter = Sampler(good_table(exact))
    drafter.sampled = drafter.probs**2
    requests = run(make_rig, model, CASES["top_k_top_p"], drafter, num_runs=6_000)
    assert p_value(requests, exact, eos_ends=False) < FAILS


@pytest.mark.usefixtures("no_gc")
def test_the_law_with_drafts_of_guessed_anchors(make_rig, model, law, monkeypatch) -> None:
    monkeypatch.setattr("verifier_svc.foresight.LEAST_RIGHT", 0.0)
    exact = law("penalties")
    drafter = EarlySampler(bad_table(exact), good_table(exact))
    requests = run(make_rig, model, CASES["penalties"], drafter, num_runs=6_000)
    assert p_value(requests, exact, eos_ends=True) > PASSES
    assert min(drafter.guesses.values()) > 250
    assert 0.05 < acceptance(requests) < 0.95


@pytest.mark.parametrize("case", CASES)
def test_coupled_ids_are_a_function_of_prompt_seed_and_target(make_rig, model, law, case) -> None:
    exact, asked = law(case), {**CASES[case], "mode": SamplingMode.COUPLED, "max_tokens": 12}
    plain = run(make_rig, model, asked, None, num_runs=200)
    drafters = {
        "good": Sampler(good_table(exact)),
        "bad": Sampler(bad_table(exact)),
        "one_hot": Sampler(good_table(exact), one_hot=True),
        "dies": Sampler(good_table(exact), dies_at=4),
    }
    for name, drafter in drafters.items():
        drafted = run(make_rig, model, asked, drafter, num_runs=200)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain], name
        assert acceptance(drafted) > (0.0 if name == "bad" else 0.1) or name == "dies"
        if name == "dies":
            assert sum(r.counters.num_accepted_tokens for r in drafted) > 0
            assert sum(r.counters.num_fallback_rounds for r in drafted) > 200
    assert len({tuple(r.token_ids) for r in plain}) > 150
