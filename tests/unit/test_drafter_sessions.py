"""drafter_svc/sessions.py: fencing, room, eviction; no block is ever lost or shared."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.sessions import Limits, Refusal, Session, SessionTable, Status

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


def test_a_wrong_base_is_refused_and_the_session_is_gone() -> None:
    sessions = table(1)
    sessions.extend(1, 7, 1, 0, 6, 0.0)
    refused = sessions.extend(1, 7, 1, 5, 1, 0.0)
    assert isinstance(refused, Refusal) and refused.status is Status.BASE_MISMATCH
    assert "rows 0..6 are held, first_len is 0, base_len is 5" in refused.detail
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


OPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "extend", "restart", "wrong", "close", "leave"]),
        st.integers(1, 2),
        st.integers(1, 4),
        st.integers(0, 12),
        st.floats(0, 0.7),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(OPS)
def test_blocks_are_conserved_and_never_shared(ops: list[tuple[str, int, int, int, float]]) -> None:
    sessions, now = table(1, 2), 0.0
    held: dict[tuple[int, int], Session] = {}  # what a verifier believes
    epochs = 0
    for op, link, session_id, num_rows, passed in ops:
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
                epoch, base_len = epochs, 0
            else:
                epoch, base_len = session.epoch, session.length + (op == "wrong")
            result = sessions.extend(link, session_id, epoch, base_len, num_rows, now)
            if isinstance(result, Session):
                held[key] = result
            else:
                assert result.status in (Status.NO_ROOM, Status.BASE_MISMATCH)
                held.pop(key, None)
        for gone in sessions.take_evicted():
            assert not held.pop(gone).live
        owned = [block for s in held.values() for block in s.block_table]
        assert len(set(owned)) == len(owned)
        assert len(owned) + sessions.num_free_blocks == LIMITS.num_blocks
        assert sessions.num_sessions == len(held) <= LIMITS.max_sessions
        for s in held.values():
            assert s.live
            room = len(s.block_table) * LIMITS.kv_block_size
            assert room - LIMITS.kv_block_size < s.length + LIMITS.block_size <= room
