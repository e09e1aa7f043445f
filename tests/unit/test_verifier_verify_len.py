"""The verify-length rule: cap, survival threshold, calibration; and what it must not look at."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import StartupError
from verifier_svc.drafting import Draft, Drafts
from verifier_svc.request import Entry, Plan, Request, SamplingParams, SpeculationParams, StopParams
from verifier_svc.verify_len import VerifyLength, load_sts


def plan_for(*cases: tuple[int, float | None]) -> Plan:
    """One entry per (max_drafts, the request's own min_survival)."""
    entries = []
    for number, (max_drafts, min_survival) in enumerate(cases, start=1):
        wishes = SpeculationParams(min_survival=min_survival)
        request = Request(
            f"r{number}", number, [1, 2], 1, SamplingParams(), StopParams(), wishes, frozenset(), 90
        )
        entries.append(Entry(request, 1, 1, True, max_drafts))
    return Plan(1, tuple(entries))


def num_chosen(
    rule: VerifyLength, logits: list[float], own: float | None = None, cap: int = 8
) -> int:
    draft = Draft(tuple(range(len(logits))), tuple(logits))
    chosen = rule.choose(plan_for((cap, own)), Drafts({1: draft})).by_session[1]
    assert chosen.token_ids == draft.token_ids[: len(chosen.token_ids)]
    assert chosen.confidence_logits == draft.confidence_logits[: len(chosen.token_ids)]
    return len(chosen.token_ids)


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def test_survival_is_the_running_product() -> None:
    rule = VerifyLength(min_survival=0.5)
    assert num_chosen(rule, [logit(0.9), logit(0.8), logit(0.69), logit(0.999)]) == 2
    assert num_chosen(rule, [logit(0.9), logit(0.8), logit(0.71), logit(0.5)]) == 3
    assert num_chosen(rule, [logit(0.4), logit(0.99)]) == 0


def test_nan_is_no_confidence_and_infinities_are_certainties() -> None:
    rule = VerifyLength(min_survival=1e-9)
    assert num_chosen(rule, [5.0, math.nan, 5.0]) == 1
    assert num_chosen(rule, [math.inf, 1000.0, -math.inf, 1000.0]) == 2
    assert num_chosen(rule, [-1000.0]) == 0


def test_without_threshold_or_confidences_only_the_cap_counts() -> None:
    assert num_chosen(VerifyLength(), [math.nan, -50.0, -50.0], cap=2) == 2
    rule = VerifyLength(min_survival=0.9)
    drafts = Drafts({1: Draft((1, 2, 3))})
    assert rule.choose(plan_for((8, None)), drafts).by_session[1].token_ids == (1, 2, 3)


def test_a_request_may_ask_for_its_own_threshold() -> None:
    logits = [logit(0.9), logit(0.6)]
    assert num_chosen(VerifyLength(min_survival=0.8), logits) == 1
    assert num_chosen(VerifyLength(min_survival=0.8), logits, own=0.5) == 2
    assert num_chosen(VerifyLength(min_survival=0.8), logits, own=0.0) == 2
    assert num_chosen(VerifyLength(), logits, own=0.95) == 0


def test_temperatures_divide_the_logits() -> None:
    rule = VerifyLength(min_survival=0.5, temperatures=(1.0, 4.0))
    assert num_chosen(rule, [logit(0.9), 4 * logit(0.6)]) == 2
    assert num_chosen(rule, [logit(0.9), 4 * logit(0.5)]) == 1


def test_oversized_unwanted_and_foreign_drafts_are_left_out() -> None:
    ids = np.arange(8).reshape(4, 2)
    probs = np.full((4, 2), 0.5, np.float32)
    draft = Draft((1, 2, 3, 4), (), ids, probs)
    drafts = Drafts({1: draft, 2: draft, 77: draft}, drafter_s=0.25)
    chosen = VerifyLength().choose(plan_for((2, None), (0, None), (3, None)), drafts)
    assert chosen.by_session.keys() == {1}
    assert chosen.drafter_s == 0.25
    cut = chosen.by_session[1]
    assert cut.token_ids == (1, 2)
    assert cut.candidate_ids is not None and cut.candidate_ids.tolist() == [[0, 1], [2, 3]]
    assert cut.candidate_probs is not None and cut.candidate_probs.shape == (2, 2)


@given(
    logits=st.lists(st.floats(-6, 6), min_size=1, max_size=7),
    other=st.lists(st.floats(-6, 6), min_size=7, max_size=7),
    at=st.integers(0, 6),
    threshold=st.floats(0.01, 0.99),
)
@settings(max_examples=200, deadline=None)
def test_whether_a_draft_is_verified_depends_on_no_later_confidence(
    logits, other, at, threshold
) -> None:
    rule = VerifyLength(min_survival=threshold)
    at = min(at, len(logits) - 1)
    changed = logits[: at + 1] + other[: len(logits) - at - 1]
    assert (num_chosen(rule, logits) > at) == (num_chosen(rule, changed) > at)


def test_sts_files() -> None:
    good = '{"format": "dspark-sts-v1", "temperatures": [1, 2.5, 0.7]}'
    assert load_sts(good, "sts.json", 3) == (1.0, 2.5, 0.7)
    bad = [
        "not json",
        "[1, 2]",
        '{"format": "other", "temperatures": [1, 1, 1]}',
        '{"format": "dspark-sts-v1"}',
        '{"format": "dspark-sts-v1", "temperatures": [1, 1]}',
        '{"format": "dspark-sts-v1", "temperatures": [1, 0, 1]}',
        '{"format": "dspark-sts-v1", "temperatures": [1, NaN, 1]}',
        '{"format": "dspark-sts-v1", "temperatures": [1, true, 1]}',
        '{"format": "dspark-sts-v1", "temperatures": [1, "2", 1]}',
    ]
    for text in bad:
        with pytest.raises(StartupError, match=r"sts\.json"):
            load_sts(text, "sts.json", 3)
