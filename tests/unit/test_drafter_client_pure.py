"""breaker.py, draft_sync.py, draft_payload.py: the verifier's bookkeeping about its drafter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_svc.breaker import Breaker, BreakerState
from verifier_svc.draft_payload import read_draft
from verifier_svc.draft_sync import Ask, DraftSync, LinkLimits
from verifier_svc.drafting import Draft
from verifier_svc.request import (
    Entry,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

B = 4


def request(session_id: int = 1, prompt: int = 10, output: int = 0, **wishes: object) -> Request:
    speculation = SpeculationParams(**wishes)  # type: ignore[arg-type]
    tokens = list(range(prompt + output))
    sampling = SamplingParams(temperature=0.0)
    return Request(
        str(session_id), session_id, tokens, prompt, sampling, StopParams(), speculation,
        frozenset(), 1000,
    )  # fmt: skip


def plan(*entries: Entry) -> Plan:
    return Plan(1, entries)


def prefill(req: Request, start: int, stop: int) -> Entry:
    req.num_computed = start
    return Entry(req, start, stop - start, stop == len(req.token_ids), 0)


def decode(req: Request, max_drafts: int = B) -> Entry:
    req.num_computed = len(req.token_ids) - 1
    return Entry(req, req.num_computed, 1, True, max_drafts)


def synced(
    max_sessions: int = 8, max_step_rows: int = 100, max_len: int = 500, window: int = 0
) -> DraftSync:
    sync = DraftSync(B, window)
    sync.new_link(LinkLimits(max_sessions, max_step_rows, max_len))
    return sync


def shape(asks: list[Ask]) -> list[tuple[int, int, int, int]]:
    return [(a.request.session_id, a.base_len, a.num_rows, a.num_drafts) for a in asks]


def test_late_steps_in_a_row_suspend_and_a_probe_leads_to_one_trial() -> None:
    breaker = Breaker(3, first_probe_s=0.25, longest_probe_s=1.0)
    assert [breaker.late(), breaker.late()] == [None, None]
    breaker.in_time()
    assert [breaker.late(), breaker.late(), breaker.late()] == [None, None, 0.25]
    assert not breaker.allows
    breaker.answered()
    assert breaker.allows and breaker.state is BreakerState.TRIAL
    assert breaker.late() == 0.5  # at once, and the probe waits longer
    delays = []
    for _ in range(3):
        breaker.answered()
        delays.append(breaker.late())
    assert delays == [1.0, 1.0, 1.0]
    breaker.answered()
    breaker.in_time()
    assert [breaker.late(), breaker.late(), breaker.late()] == [None, None, 0.25]


def test_prompt_rows_follow_each_chunk_and_drafts_begin_with_the_first_token() -> None:
    sync, req = synced(), request(prompt=10)
    assert shape(sync.asks(plan(prefill(req, 0, 6)), 0.0)) == []  # nothing computed yet
    assert shape(sync.asks(plan(prefill(req, 6, 10)), 0.0)) == [(1, 0, 6, 0)]
    req.token_ids.append(50)
    assert shape(sync.asks(plan(decode(req)), 0.0)) == [(1, 6, 4, 4)]
    req.token_ids += [51, 52, 53]  # two drafts accepted and a bonus
    (ask,) = sync.asks(plan(decode(req, max_drafts=2)), 0.0)
    assert shape([ask]) == [(1, 10, 3, 2)] and ask.anchor_position == 13


def test_a_long_context_catches_up_over_steps_and_drafts_only_when_complete() -> None:
    sync, req = synced(max_step_rows=4), request(prompt=9, output=1)
    steps = [shape(sync.asks(plan(decode(req)), 0.0)) for _ in range(4)]
    assert steps == [[(1, 0, 4, 0)], [(1, 4, 4, 0)], [(1, 8, 1, 4)], [(1, 9, 0, 4)]]


def test_decoding_requests_go_before_prompts_when_rows_are_short() -> None:
    sync, prompt, chat = synced(max_step_rows=6), request(1, 100), request(2, 4, 1)
    asks = sync.asks(plan(prefill(prompt, 50, 100), decode(chat)), 0.0)
    assert shape(asks) == [(2, 0, 4, 4), (1, 0, 2, 0)]


def test_nothing_is_sent_for_requests_that_will_not_draft() -> None:
    sync = synced()
    off, zero = request(1, enabled=False), request(2, max_draft_tokens=0)
    full = request(3, output=1)
    entries = (prefill(off, 5, 10), prefill(zero, 5, 10), decode(full, max_drafts=0))
    assert sync.asks(plan(*entries), 0.0) == [] and sync.num_open == 0


def test_a_context_beyond_the_drafters_closes_the_session() -> None:
    sync, req = synced(max_len=16), request(prompt=11, output=1)
    assert len(sync.asks(plan(decode(req)), 0.0)) == 1
    req.token_ids += [1, 2]
    assert sync.asks(plan(decode(req)), 0.0) == []
    assert sync.take_closing() == [1] and sync.take_closing() == []


def test_only_so_many_sessions_are_opened_and_a_released_one_makes_room() -> None:
    sync = synced(max_sessions=2)
    reqs = [request(i, output=1) for i in (1, 2, 3)]
    entries = plan(*map(decode, reqs))
    assert [a.request.session_id for a in sync.asks(entries, 0.0)] == [1, 2]
    sync.release(1)
    assert sync.take_closing() == [1]
    assert [a.request.session_id for a in sync.asks(plan(*map(decode, reqs[1:])), 0.0)] == [2, 3]


def test_a_lost_session_restarts_at_once_but_not_for_ever() -> None:
    sync, req = synced(), request(output=1)
    (ask,) = sync.asks(plan(decode(req)), 0.0)
    sync.restart(1, ask.epoch, 0.0, wait=False)
    (again,) = sync.asks(plan(decode(req)), 0.0)
    assert again.base_len == 0 and again.epoch > ask.epoch
    sync.restart(1, ask.epoch, 0.0, wait=False)  # late news of the first life
    assert shape(sync.asks(plan(decode(req)), 0.0)) == [(1, 10, 0, 4)]
    sync.restart(1, again.epoch, 0.0, wait=False)
    assert sync.asks(plan(decode(req)), 0.2) == []
    assert len(sync.asks(plan(decode(req)), 0.3)) == 1


def test_no_room_waits_longer_each_time_until_a_draft_comes() -> None:
    sync, req, now, waits = synced(), request(output=1), 0.0, []
    for _ in range(7):
        (ask,) = sync.asks(plan(decode(req)), now)
        sync.restart(1, ask.epoch, now, wait=True)
        assert sync.num_open == 0
        before = now
        while not sync._sessions[1].retry_at <= now:
            now += 0.125
        waits.append(now - before)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    (ask,) = sync.asks(plan(decode(req)), now)
    sync.drafted(1)
    sync.restart(1, ask.epoch, now, wait=True)
    assert sync._sessions[1].retry_at == now + 0.25


def test_eviction_and_a_new_stream_start_from_row_0() -> None:
    sync, req = synced(), request(output=1)
    (first,) = sync.asks(plan(decode(req)), 0.0)
    sync.evicted([1, 99], 0.0)
    assert sync.asks(plan(decode(req)), 0.1) == []
    (second,) = sync.asks(plan(decode(req)), 0.5)
    sync.new_link(LinkLimits(8, 100, 500))
    (third,) = sync.asks(plan(decode(req)), 0.5)
    assert first.base_len == second.base_len == third.base_len == 0
    assert first.epoch < second.epoch < third.epoch


def test_a_preempted_request_is_closed_and_starts_over() -> None:
    sync, req = synced(), request(output=3)
    sync.asks(plan(decode(req)), 0.0)
    sync.release(1)
    assert sync.take_closing() == [1]
    assert shape(sync.asks(plan(prefill(req, 4, 13)), 0.0)) == [(1, 0, 4, 0)]


def test_a_window_needs_no_row_before_it() -> None:
    sync, req = synced(window=6), request(prompt=20)
    assert sync.asks(plan(prefill(req, 10, 16)), 0.0) == [] and sync.num_open == 0
    (ask,) = sync.asks(plan(prefill(req, 16, 20)), 0.0)
    assert shape([ask]) == [(1, 14, 2, 0)] and ask.first_len == 14
    req.token_ids.append(50)
    assert shape(sync.asks(plan(decode(req)), 0.0)) == [(1, 16, 4, 4)]
    req.token_ids += [0] * 6
    (ask,) = sync.asks(plan(decode(req)), 0.0)
    assert shape([ask]) == [(1, 20, 6, 4)] and ask.first_len == 14


def test_a_request_computed_again_may_decode_from_its_last_known_token() -> None:
    sync, req = synced(window=6), request(prompt=20, output=3)
    (ask,) = sync.asks(plan(prefill(req, 18, 22)), 0.0)  # a chunk that leaves one token
    assert shape([ask]) == [(1, 16, 2, 0)]
    (ask,) = sync.asks(plan(decode(req)), 0.0)
    assert shape([ask]) == [(1, 18, 4, 4)] and ask.first_len <= ask.anchor_position - 6


def test_rows_that_fell_out_of_the_window_unsent_begin_a_new_epoch() -> None:
    sync, req = synced(window=6), request(prompt=20, output=1)
    (before,) = sync.asks(plan(decode(req)), 0.0)
    req.token_ids += [0] * 7  # undrafted rounds
    (after,) = sync.asks(plan(decode(req)), 0.0)
    assert (before.first_len, after.first_len, after.base_len, after.num_rows) == (14, 21, 21, 6)
    assert after.epoch > before.epoch


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["round", "lost", "no_room", "evict", "link", "gap"]), max_size=30),
    st.integers(3, 20),
    st.sampled_from([0, 5, 12]),
)
def test_rows_sent_in_one_epoch_are_always_gapless(
    events: list[str], max_step_rows: int, window: int
) -> None:
    sync = synced(max_step_rows=max_step_rows, window=window)
    req, now = request(prompt=7, output=1), 0.0
    held: dict[int, int] = {}  # epoch -> rows, as an honest drafter counts them
    ask = None
    for event in events:
        now += 10.0
        if event == "round":
            for ask in sync.asks(plan(decode(req)), now):
                assert held.get(ask.epoch, ask.first_len) == ask.base_len
                held[ask.epoch] = ask.anchor_position
                assert ask.num_rows <= max_step_rows
                assert window or not ask.first_len
                if window:  # no row that no block will look at
                    assert ask.base_len >= max(0, len(req.token_ids) - 1 - window)
                if ask.num_drafts:
                    assert ask.anchor_position == len(req.token_ids) - 1
                    assert ask.first_len <= max(0, ask.anchor_position - window)
            req.token_ids += [0, 1]
        elif event == "gap":
            req.token_ids += [0] * 9
        elif event == "link":
            sync.new_link(LinkLimits(8, max_step_rows, 500))
        elif event == "evict":
            sync.evicted([1], now)
        elif ask is not None:
            sync.restart(1, ask.epoch, now, wait=event == "no_room")


def payload(**changes: object) -> dict[str, object]:
    ids = np.array([[5, 7, 9], [1, 2, 3]], "<i4")
    probs = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], "<f4")
    good = {
        "token_ids": np.array([7, 3], "<i4").tobytes(),
        "confidence_logits": np.array([0.5, -2.0], "<f4").tobytes(),
        "top_k": 3,
        "candidate_ids": ids.tobytes(),
        "candidate_probs": probs.tobytes(),
        "max_drafts": 4,
        "vocab_size": 10,
        "sampled": True,
    }
    return {**good, **changes}


def f4(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def i4(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def test_a_good_sampled_payload_becomes_a_draft() -> None:
    draft = read_draft(**payload())  # type: ignore[arg-type]
    assert isinstance(draft, Draft)
    assert draft.token_ids == (7, 3) and draft.confidence_logits == (0.5, -2.0)
    assert draft.candidate_ids is not None and draft.candidate_ids.dtype == np.int64
    assert draft.candidate_probs is not None and draft.candidate_probs[1, 2] == np.float32(0.7)


def test_a_good_greedy_payload_has_no_candidates_and_may_lack_confidences() -> None:
    empty = {"top_k": 0, "candidate_ids": b"", "candidate_probs": b"", "confidence_logits": b""}
    assert read_draft(**payload(**empty, sampled=False)) == Draft((7, 3))  # type: ignore[arg-type]


BAD = {
    "no tokens": {"token_ids": b""},
    "half a token": {"token_ids": b"\0" * 7},
    "too many tokens": {"max_drafts": 1},
    "token outside": {"vocab_size": 7},
    "negative token": {"token_ids": i4(-1, 3)},
    "confidence length": {"confidence_logits": f4(1.0)},
    "confidence nan": {"confidence_logits": f4(1.0, np.nan)},
    "no candidates": {"top_k": 0},
    "candidate bytes": {"candidate_ids": i4(1, 2, 3)},
    "prob bytes": {"candidate_probs": f4(1.0)},
    "unasked candidates": {"sampled": False},
    "candidate outside": {"candidate_ids": i4(5, 7, 10, 1, 2, 3)},
    "negative candidate": {"candidate_ids": i4(5, 7, -9, 1, 2, 3)},
    "sum": {"candidate_probs": f4(0.5, 0.25, 0.26, 0.1, 0.2, 0.7)},
    "negative prob": {"candidate_probs": f4(1.25, 0.25, -0.5, 0.1, 0.2, 0.7)},
    "nan prob": {"candidate_probs": f4(0.5, np.nan, 0.25, 0.1, 0.2, 0.7)},
    "inf prob": {"candidate_probs": f4(0.5, np.inf, -np.inf, 0.1, 0.2, 0.7)},
    "twice": {"candidate_ids": i4(5, 7, 5, 1, 2, 3)},
    "token absent": {"token_ids": i4(8, 3)},
    "token impossible": {"candidate_probs": f4(0.75, 0.0, 0.25, 0.1, 0.2, 0.7)},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_payload_is_refused_with_a_reason(case: str) -> None:
    reason = read_draft(**payload(**BAD[case]))  # type: ignore[arg-type]
    assert isinstance(reason, str) and reason


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 12), st.booleans())
def test_random_bytes_never_raise(a: bytes, b: bytes, top_k: int, sampled: bool) -> None:
    result = read_draft(
        token_ids=a, confidence_logits=b, top_k=top_k, candidate_ids=b, candidate_probs=a,
        max_drafts=7, vocab_size=1000, sampled=sampled,
    )  # fmt: skip
    assert isinstance(result, Draft | str)
