"""drafter_svc/sessions.py: fencing, room, eviction; no block is ever lost or shared."""

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.sessions import NO_BLOCK, Limits, Refusal, Session, SessionTable, Status

LIMITS = Limits(
    num_blocks=12,
    kv_block_size=4,
    block_size=3,
    max_sessions=5,
    max_sessions_per_link=4,
    max_context_len=40,
    evict_idle_s=1.0,
)


def table(*links: int, limits: Limits = LIMITS) -> SessionTable:
    made = SessionTable(limits)
    for link in links:
        made.open_link(link)
    return made


def status(result: Session | Refusal) -> Status:
    return result.status if isinstance(result, Refusal) else Status.OK


def test_rows_append_and_the_scratch_block_always_fits() -> None:
    sessions = table(1)
    session = sessions.extend(1, 7, 1, 0, 6, 0.0)
    assert isinstance(session, Session)
    assert (session.length, len(session.block_table)) == (6, 3)  # 6 rows + 3 scratch in blocks of 4
    assert sessions.extend(1, 7, 1, 6, 1, 0.0) is session
    assert (session.length, len(session.block_table)) == (7, 3)


def test_a_link_that_left_leaves_nothing() -> None:
    sessions, untouched = table(1), table(1)
    for link in range(2, 50):
        sessions.open_link(link)
        sessions.extend(link, 7, 1, 0, 6, 0.0)
        sessions.close_link(link)
    assert repr(vars(sessions)) == repr(vars(untouched))  # == would take a count of 0 for none


@pytest.mark.parametrize("base_len", [2, 7])
def test_a_wrong_base_is_refused_and_the_session_is_gone(base_len: int) -> None:
    sessions = table(1)
    sessions.extend(1, 7, 1, 0, 6, 0.0)
    refused = sessions.extend(1, 7, 1, base_len, 1, 0.0)
    assert isinstance(refused, Refusal) and refused.status is Status.BASE_MISMATCH
    assert f"rows 0..6 are held; base_len is {base_len}, 3..6 fit" in refused.detail
    assert (sessions.num_sessions, sessions.num_free_blocks) == (0, 12)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_base_on_a_session_or_epoch_that_never_started_is_unknown(epoch: int) -> None:
    sessions = table(1)
    if epoch == 2:
        sessions.extend(1, 7, 1, 0, 6, 0.0)
    assert status(sessions.extend(1, 7, epoch, 6, 1, 0.0)) is Status.UNKNOWN_SESSION
    assert sessions.num_sessions == 0


def test_a_new_epoch_starts_over_and_an_old_one_is_stale_without_harm() -> None:
    sessions = table(1)
    sessions.extend(1, 7, 1, 0, 9, 0.0)
    restarted = sessions.extend(1, 7, 2, 0, 2, 0.0)
    assert isinstance(restarted, Session) and restarted.length == 2
    assert status(sessions.extend(1, 7, 1, 9, 1, 0.0)) is Status.STALE
    assert sessions.extend(1, 7, 2, 2, 1, 0.0) is restarted


def test_the_same_session_id_of_two_verifiers_is_two_sessions() -> None:
    sessions = table(1, 2)
    assert sessions.extend(1, 7, 1, 0, 3, 0.0) is not sessions.extend(2, 7, 1, 0, 5, 0.0)
    sessions.close_link(1)
    assert sessions.num_sessions == 1
    assert status(sessions.extend(2, 7, 1, 5, 1, 0.0)) is Status.OK


def test_a_context_longer_than_a_session_may_hold_is_no_room() -> None:
    sessions = table(1)
    assert status(sessions.extend(1, 7, 1, 0, 37, 0.0)) is Status.OK  # 37 + 3 = 40
    refused = sessions.extend(1, 7, 1, 37, 1, 0.0)
    assert isinstance(refused, Refusal) and refused.status is Status.NO_ROOM
    assert "at most 40" in refused.detail and sessions.num_free_blocks == 12


def test_a_busy_pool_refuses_and_an_idle_session_makes_room_with_notice() -> None:
    sessions = table(1)
    sessions.extend(1, 1, 1, 0, 20, 0.0)  # 6 blocks
    sessions.extend(1, 2, 1, 0, 10, 0.5)  # 4 blocks
    assert status(sessions.extend(1, 3, 1, 0, 9, 0.9)) is Status.NO_ROOM
    assert sessions.take_evicted() == [] and sessions.num_sessions == 2
    assert status(sessions.extend(1, 3, 1, 0, 9, 1.2)) is Status.OK
    assert sessions.take_evicted() == [(1, 1)] and sessions.take_evicted() == []
    assert status(sessions.extend(1, 1, 1, 20, 1, 1.2)) is Status.UNKNOWN_SESSION


def test_a_greedy_verifier_yields_to_one_within_its_share() -> None:
    sessions = table(1, 2)
    for session_id in (1, 2, 3):
        sessions.extend(1, session_id, 1, 0, 13, 0.0)  # 4 blocks each: all 12
    assert status(sessions.extend(1, 4, 1, 0, 1, 0.1)) is Status.NO_ROOM
    assert status(sessions.extend(2, 1, 1, 0, 13, 0.1)) is Status.OK
    assert sessions.take_evicted() == [(1, 1)]
    assert status(sessions.extend(2, 2, 1, 0, 13, 0.1)) is Status.NO_ROOM  # would pass 6 blocks


def test_session_limits_per_verifier_and_in_all() -> None:
    sessions = table(1, 2)
    for session_id in range(4):
        assert status(sessions.extend(1, session_id, 1, 0, 1, 0.0)) is Status.OK
    assert status(sessions.extend(1, 9, 1, 0, 1, 0.0)) is Status.NO_ROOM
    assert status(sessions.extend(2, 0, 1, 0, 1, 0.0)) is Status.OK
    assert status(sessions.extend(2, 1, 1, 0, 1, 0.0)) is Status.NO_ROOM  # 5 in all, none idle
    assert status(sessions.extend(2, 1, 1, 0, 1, 2.0)) is Status.OK


def windowed() -> SessionTable:
    return table(1, limits=replace(LIMITS, context_window=8, max_context_len=1000))


def test_rows_that_begin_beyond_what_fits_are_refused_before_anything_is_laid_out() -> None:
    sessions = windowed()
    tracemalloc.start()
    try:
        refused = sessions.extend(1, 7, 1, 2**24, 0, now=0.0, first_len=2**24)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status(refused) is Status.NO_ROOM
    assert peak_bytes < 100_000, "a table for the places before first_len"


def test_a_windows_rows_may_begin_anywhere_and_only_they_take_blocks() -> None:
    sessions = windowed()
    session = sessions.extend(1, 7, 1, 402, 6, 0.0, first_len=402)
    assert isinstance(session, Session)
    # Rows 402..407 and 3 scratch rows behind them lie in blocks 100..102.
    assert (session.length, session.num_forgotten, len(session.blocks)) == (408, 100, 3)
    assert len(session.block_table) == 103 and set(session.block_table[:100]) == {NO_BLOCK}
    for length in range(408, 440, 2):
        assert sessions.extend(1, 7, 1, length, 2, 0.0, first_len=402) is session
    assert (session.length, session.num_forgotten) == (440, (438 - 8 - 3) // 4)
    assert sessions.num_free_blocks == 12 - len(session.blocks) == 12 - 5
    sessions.close(1, 7)
    assert sessions.num_free_blocks == 12


@pytest.mark.parametrize(
    ("epoch", "first_len", "base_len", "refused"),
    [
        (1, 402, 408, Status.OK),
        (1, 402, 409, Status.BASE_MISMATCH),
        (1, 408, 408, Status.BASE_MISMATCH),  # as if the epoch began here
        (2, 402, 408, Status.UNKNOWN_SESSION),
        (2, 408, 408, Status.OK),
        (0, 408, 408, Status.STALE),
    ],
)
def test_a_window_is_fenced_like_a_whole_context(
    epoch: int, first_len: int, base_len: int, refused: Status
) -> None:
    sessions = windowed()
    sessions.extend(1, 7, 1, 402, 6, 0.0, first_len=402)
    assert status(sessions.extend(1, 7, epoch, base_len, 1, 0.0, first_len)) is refused


OPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "cut", "restart", "wrong", "close", "leave"]),
        st.integers(1, 2),
        st.integers(1, 4),
        st.integers(0, 12),
        st.floats(0, 0.7),
        st.integers(1, LIMITS.block_size),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(OPS, st.sampled_from([0, 8]))
def test_blocks_are_conserved_and_never_shared(
    ops: list[tuple[str, int, int, int, float, int]], window: int
) -> None:
    sessions, now = table(1, 2, limits=replace(LIMITS, context_window=window)), 0.0
    held: dict[tuple[int, int], Session] = {}  # what a verifier believes
    longest: dict[Session, int] = {}  # what it has held at a time, rows and scratch
    epochs = 0
    for op, link, session_id, num_rows, passed, cut in ops:
        now += passed
        key = (link, session_id)
        session = held.get(key)
        if op == "close":
            sessions.close(link, session_id)
            held.pop(key, None)
        elif op == "leave":
            sessions.close_link(link)
            sessions.open_link(link)
            held = {k: s for k, s in held.items() if k[0] != link}
        else:
            if session is None or op == "restart":
                epochs += 1
                epoch, base_len = epochs, session_id * 5 if window else 0
                first_len = base_len
            else:
                first_len = session.first_len
                epoch, base_len = session.epoch, session.length + (op == "wrong")
                if op == "cut":
                    base_len, num_rows = max(first_len, base_len - cut), num_rows % 3
            result = sessions.extend(link, session_id, epoch, base_len, num_rows, now, first_len)
            if isinstance(result, Session):
                held[key] = result
                assert (result.length, result.last_used) == (base_len + num_rows, now)
                end = result.length + LIMITS.block_size
                longest[result] = max(longest.get(result, 0), end)
            else:
                assert result.status in (Status.NO_ROOM, Status.BASE_MISMATCH)
                held.pop(key, None)
        for gone in sessions.take_evicted():
            assert not held.pop(gone).live
        owned = [block for s in held.values() for block in s.blocks]
        assert len(set(owned)) == len(owned)
        assert len(owned) + sessions.num_free_blocks == LIMITS.num_blocks
        assert sum(sessions._blocks_of.values()) == len(owned)  # who is greedy depends on it
        assert sessions.num_sessions == len(held) <= LIMITS.max_sessions
        for s in held.values():
            assert s.live and NO_BLOCK not in s.blocks
            assert s.num_forgotten * LIMITS.kv_block_size <= max(s.first_len, s.length - window)
            room = len(s.block_table) * LIMITS.kv_block_size
            assert s.length + LIMITS.block_size <= room < longest[s] + LIMITS.kv_block_size
