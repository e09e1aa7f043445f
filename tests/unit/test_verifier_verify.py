"""The acceptance rules: the joint law of the first three tokens, for drafts of every kind.

A Markov chain over six tokens stands in for the target: exact probabilities are products of table
entries. All runs of a case go through `verify` side by side, round by round. Deliberately wrong
rules must fail the same test: that shows its power.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy import stats

import verifier_svc.verify as verify_module
from verifier_svc.drafting import Draft, Drafts
from verifier_svc.request import (
    Entry,
    Plan,
    Request,
    SamplingMode,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from verifier_svc.sampling.probs import target_probs
from verifier_svc.verify import Verifier
from verifier_svc.verify_len import VerifyLength

VOCAB, NUM_TOKENS, NUM_RUNS = 6, 3, 6_000
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
OTHER = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(6)) * 1.5
PASSES, FAILS = 1e-3, 1e-6  # p-values; everything here is deterministic


@dataclass
class Chain:
    """A drafter that follows its own Markov table and says (or hides) from what it sampled."""

    probs: np.ndarray  # [VOCAB, VOCAB], what it samples from
    sends: str = "probs"  # "probs", "nothing" (one-hot)
    top_k: int = VOCAB
    length: int = 2
    confidence: Callable[[int, int], float] | None = None  # (previous token, draft) -> logit
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def __post_init__(self) -> None:
        order = np.argsort(-self.probs, axis=1)[:, : self.top_k]
        kept = np.take_along_axis(self.probs, order, 1)
        self.ids, self.sent = order, (kept / kept.sum(1, keepdims=True)).astype(np.float32)
        self.sampled = self.sent  # what the tokens are really drawn from

    def draft(self, previous: np.ndarray) -> list[Draft]:
        """One draft after each of the tokens `previous`."""
        tokens, ids, probs, confidences = [], [], [], []
        for _ in range(self.length):
            ids.append(self.ids[previous])
            probs.append(self.sent[previous])
            running = self.sampled[previous].cumsum(1, dtype=np.float64)
            uniforms = self.rng.random((len(previous), 1)) * running[:, -1:]
            column = (running <= uniforms).sum(1)
            token = ids[-1][np.arange(len(previous)), column]
            if self.confidence:
                pairs = zip(previous, token, strict=True)
                confidences.append([self.confidence(int(a), int(b)) for a, b in pairs])
            tokens.append(token)
            previous = token
        columns = np.stack(tokens, 1).tolist()
        logits = list(zip(*confidences, strict=True)) or [()] * len(columns)
        if self.sends == "nothing":
            return [Draft(tuple(c), z) for c, z in zip(columns, logits, strict=True)]
        arrays = zip(columns, logits, np.stack(ids, 1), np.stack(probs, 1), strict=True)
        return [Draft(tuple(c), z, i, p) for c, z, i, p in arrays]


def softmax(table: torch.Tensor) -> np.ndarray:
    return table.double().softmax(1).numpy()


def run(
    params: SamplingParams,
    drafter: Chain | None,
    rule: Callable[[Plan, Drafts], Drafts] | None = None,
    num_runs: int = NUM_RUNS,
) -> tuple[np.ndarray, int, int]:
    """First three tokens of every run [num_runs, 3], drafts verified, drafts accepted."""
    requests = [
        Request(
            f"r{i}", i, [0], 1, replace(params, seed=i), StopParams(max_tokens=9),
            SpeculationParams(), frozenset(), 10,
        )
        for i in range(num_runs)
    ]  # fmt: skip
    verifier, num_drafts, num_accepted = Verifier(), 0, 0
    rule = rule or VerifyLength().choose
    while live := [request for request in requests if request.num_output < NUM_TOKENS]:
        entries = tuple(Entry(r, len(r.token_ids) - 1, 1, True, 4) for r in live)
        plan = Plan(1, entries)
        drafts = Drafts()
        if drafter:
            proposals = drafter.draft(np.array([r.token_ids[-1] for r in live]))
            drafts = rule(
                plan, Drafts({r.session_id: d for r, d in zip(live, proposals, strict=True)})
            )
        rows = [
            token
            for r in live
            for token in (r.token_ids[-1], *(drafts.of(r).token_ids if drafts.of(r) else ()))
        ]
        verdicts = verifier.verify(LOGITS[rows], plan, drafts)
        for index, request in enumerate(live):
            verdict = verdicts[index]
            assert len(verdict.token_ids) == verdict.num_accepted + 1
            request.token_ids += verdict.token_ids
            num_drafts += verdict.num_drafts
            num_accepted += verdict.num_accepted
    tokens = np.array([r.token_ids[1 : 1 + NUM_TOKENS] for r in requests])
    return tokens, num_drafts, num_accepted


def p_value(tokens: np.ndarray, params: SamplingParams) -> float:
    """Chi-square of the joint law; 0 if something impossible was emitted."""
    rows = target_probs(LOGITS.clone(), [params] * VOCAB).double().numpy()
    joint = np.einsum("a,ab,bc->abc", rows[0], rows, rows).ravel()
    seen = np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    if seen[joint == 0].any():
        return 0.0
    expected = joint * len(tokens)
    small = expected < 5
    seen = np.append(seen[~small], seen[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    return float(stats.chisquare(seen[keep], expected[keep] * (seen.sum() / expected.sum())).pvalue)


TARGETS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.7, temperature=1.3),
}
DRAFTERS: dict[str, Callable[[], Chain | None]] = {
    "none": lambda: None,
    "same": lambda: Chain(softmax(LOGITS)),
    "near": lambda: Chain(softmax(LOGITS + 0.3 * OTHER)),
    "other": lambda: Chain(softmax(OTHER)),  # mass where a truncated target has none
    "sparse": lambda: Chain(softmax(LOGITS + 0.3 * OTHER), top_k=3),
    "single": lambda: Chain(softmax(LOGITS), top_k=1),
    "one_hot": lambda: Chain(softmax(LOGITS), top_k=1, sends="nothing"),
    "hidden": lambda: Chain(softmax(OTHER), sends="nothing"),
    "long": lambda: Chain(softmax(LOGITS + 0.3 * OTHER), top_k=4, length=4),
}


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        *(("plain", drafter) for drafter in ("near", "other", "sparse", "one_hot")),
        *(("top_k", drafter) for drafter in ("other", "sparse")),
        *(("top_p", drafter) for drafter in ("other", "one_hot")),
        *(("cool", drafter) for drafter in ("near", "other")),
    ],
)
def test_rejection_emits_the_target_law(target: str, drafter: str) -> None:
    params = TARGETS[target]
    tokens, num_drafts, num_accepted = run(params, DRAFTERS[drafter]())
    assert p_value(tokens, params) > PASSES
    assert 0 < num_accepted < num_drafts


@pytest.mark.parametrize("drafter", ["none", "single", "same", "hidden", "long"])
def test_rejection_emits_the_target_law_for_stranger_drafts(drafter: str) -> None:
    params = TARGETS["plain"]
    tokens, num_drafts, num_accepted = run(params, DRAFTERS[drafter]())
    assert p_value(tokens, params) > PASSES
    if drafter == "same":
        assert num_accepted >= num_drafts - 2  # equal but for float32 rounding


@pytest.mark.parametrize("target", TARGETS)
def test_coupled_emits_the_target_law_and_ignores_the_drafter(target: str) -> None:
    params = replace(TARGETS[target], mode=SamplingMode.COUPLED)
    tokens, _, _ = run(params, None)
    assert p_value(tokens, params) > PASSES
    for drafter in ("near", "one_hot", "long"):
        same, num_drafts, num_accepted = run(params, DRAFTERS[drafter](), num_runs=500)
        assert np.array_equal(same, tokens[:500])
        assert 0 < num_accepted < num_drafts


def confident(previous: int, draft: int) -> float:
    """Depends on the token before only, as a real head does."""
    return 2.0 if previous % 2 else -2.0


def test_a_survival_threshold_leaves_the_law_alone() -> None:
    drafter = Chain(softmax(LOGITS + 0.3 * OTHER), confidence=confident, length=3)
    tokens, num_drafts, num_accepted = run(
        TARGETS["plain"], drafter, VerifyLength(min_survival=0.5).choose
    )
    assert p_value(tokens, TARGETS["plain"]) > PASSES
    assert 0 < num_accepted < num_drafts


def test_power_a_length_rule_that_looks_at_the_draft_itself_fails() -> None:
    def hindsight(plan: Plan, drafts: Drafts) -> Drafts:
        """Verifies both drafts or none, depending on what the first one is."""
        return Drafts({
            session: draft.truncated(2 if draft.token_ids[0] % 2 else 0)
            for session, draft in drafts.by_session.items()
        })  # fmt: skip

    tokens, _, _ = run(TARGETS["plain"], Chain(softmax(OTHER)), hindsight)
    assert p_value(tokens, TARGETS["plain"]) < FAILS


def test_power_a_drafter_that_sampled_from_something_else_fails() -> None:
    drafter = Chain(softmax(LOGITS + 0.3 * OTHER))
    drafter.sampled = np.roll(drafter.sent, 1, axis=1)
    tokens, _, _ = run(TARGETS["plain"], drafter)
    assert p_value(tokens, TARGETS["plain"]) < FAILS


MUTATIONS = {
    "residual not subtracted": ("-minus", "0 * minus"),
    "draft_probs left out": ("uniforms * drafted < own", "uniforms < own"),
    "everything accepted": ("uniforms * drafted < own", "own > 0"),
    "one noise for both": ("num_accepted, RESIDUAL", "num_accepted, ACCEPT"),
    "bonus from a residual": ("(num_accepted < num_drafts)", "(num_accepted <= num_drafts)"),
    "residual of the first draft": ("candidate_ids[each, at]", "candidate_ids[each, 0 * at]"),
    "correction from the first row": ("probs[starts + num_accepted]", "probs[starts]"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_power_wrong_rules_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTATIONS[name]
    source = inspect.getsource(verify_module._reject)
    assert source.count(old) == 1
    namespace = dict(verify_module.__dict__)
    exec(source.replace(old, new), namespace)  # the rule as someone might get it wrong
    monkeypatch.setattr(verify_module, "_reject", namespace["_reject"])
    tokens, _, _ = run(TARGETS["plain"], Chain(softmax(LOGITS + 0.6 * OTHER)))
    assert p_value(tokens, TARGETS["plain"]) < FAILS


def one_row_each(params: SamplingParams, logits: torch.Tensor, draft: Draft, n: int = 300):
    """n requests of different seeds with the same logits and the same draft."""
    requests = [
        Request(
            f"r{i}", i, [0, 1], 1, replace(params, seed=i), StopParams(),
            SpeculationParams(), frozenset(), 90,
        )
        for i in range(n)
    ]  # fmt: skip
    plan = Plan(1, tuple(Entry(r, 1, 1, True, 8) for r in requests))
    drafts = Drafts(dict.fromkeys(range(n), draft))
    return Verifier().verify(logits.repeat(n, 1), plan, drafts)


def sent(token_ids: list[int], ids: list[list[int]], probs: list[list[float]]) -> Draft:
    return Draft(tuple(token_ids), (), np.array(ids), np.array(probs, np.float32))


def test_what_the_target_cannot_emit_is_never_accepted() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, 0.0, 0.0, 0.0]]).repeat(2, 1)
    draft = sent([2], [[2, 0]], [[1e-30, 1.0]])  # a ratio that any clamp would get wrong
    for verdict in one_row_each(SamplingParams(), logits, draft).values():
        assert verdict.num_accepted == 0 and verdict.token_ids[0] != 2


def test_less_drafted_than_wanted_is_always_accepted() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0, 0.0, 0.0]]).repeat(2, 1)
    draft = sent([0], [[0, 1]], [[0.5, 0.5]])
    assert all(v.num_accepted == 1 for v in one_row_each(SamplingParams(), logits, draft).values())


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """The target is a certainty and so is the draft, of another token that has no mass."""
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 3] = 0.0
    draft = sent([4], [[4, 3]], [[0.0, 1.0]])
    for verdict in one_row_each(SamplingParams(), logits, draft).values():
        assert verdict.token_ids == (3,)


def test_candidates_that_come_twice_count_twice_on_both_sides() -> None:
    logits = torch.zeros(2, VOCAB)
    draft = sent([1], [[1, 1, 2]], [[0.4, 0.4, 0.2]])
    verdicts = one_row_each(SamplingParams(), logits, draft, n=6000).values()
    accepted = sum(v.num_accepted for v in verdicts) / 6000
    assert accepted == pytest.approx((1 / 6) / 0.8, abs=0.02)
    rejected = [v.token_ids[0] for v in verdicts if not v.num_accepted]
    assert 1 not in rejected and 2 not in rejected  # draft_probs 0.8 and 0.2 above 1/6


def test_greedy_requests_compare_with_the_arg_max_whatever_was_sent() -> None:
    logits = torch.eye(VOCAB)[[1, 2, 3]]
    greedy = SamplingParams(temperature=0.0)
    exact = sent([1, 2], [[1, 0], [2, 0]], [[0.5, 0.5]] * 2)
    assert one_row_each(greedy, logits, exact, 1)[0].token_ids == (1, 2, 3)
    wrong = sent([1, 0], [[1, 0], [2, 0]], [[0.5, 0.5]] * 2)
    assert one_row_each(greedy, logits, wrong, 1)[0].token_ids == (1, 2)


def test_a_mixed_batch_decides_each_request_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(seed=4, logprobs=3),
        SamplingParams(seed=5, mode=SamplingMode.COUPLED, top_k=3),
        SamplingParams(seed=6, top_p=0.8),
        SamplingParams(seed=7, min_p=0.2, logit_bias=((2, 1.5),), logprobs=0),
    ] * 3
    entries, proposals, parts = [], {}, []
    for i, params in enumerate(kinds):
        request = Request(
            f"r{i}",
            i,
            [0, i % VOCAB],
            1,
            params,
            StopParams(),
            SpeculationParams(),
            frozenset(),
            90,
        )
        decodes = i % 4 != 3
        entries.append(Entry(request, 1, 1, decodes or i % 8 != 7, 4 if decodes else 0))
        length = i % 3 if decodes else 0
        if length:
            tokens = [int(t) for t in torch.randint(VOCAB, (length,), generator=generator)]
            pairs = [[t, (t + 1) % VOCAB] for t in tokens]
            plain = Draft(tuple(tokens))
            proposals[i] = sent(tokens, pairs, [[0.6, 0.4]] * length) if i % 2 else plain
        num_rows = length + 1 if entries[-1].samples else 0
        parts.append(torch.randn(num_rows, VOCAB, generator=generator))
    drafts = Drafts(proposals)
    together = Verifier().verify(torch.cat(parts), Plan(1, tuple(entries)), drafts)
    assert together.keys() == {i for i, entry in enumerate(entries) if entry.samples}
    for index, verdict in together.items():
        alone = Verifier().verify(parts[index], Plan(1, (entries[index],)), drafts)[0]
        assert (alone.token_ids, alone.num_accepted) == (verdict.token_ids, verdict.num_accepted)
        asked = kinds[index].logprobs is not None
        assert len(verdict.logprobs) == (len(verdict.token_ids) if asked else 0)
