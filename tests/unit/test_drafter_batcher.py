"""drafter_svc/batcher.py: the inbox between the threads, and superseded asks."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.batcher import (
    Entry,
    Inbox,
    LinkClosed,
    Ping,
    RowForm,
    Step,
    Work,
    newest_entries,
)

FORM = RowForm(projected=True, dtype="fp32", width=4)


def entry(session_id: int, base_len: int = 0) -> Entry:
    return Entry(session_id, 1, base_len, 0, 2, 5)


def step(link: int, step_id: int, *entries: Entry, close: tuple[int, ...] = ()) -> Step:
    return Step(link, step_id, entries, b"", FORM, close)


def test_take_waits_for_work_and_takes_all_of_it_in_order() -> None:
    inbox, batches = Inbox(), []
    started = threading.Event()

    def engine() -> None:
        started.set()
        while batch := inbox.take():
            batches.append(batch)

    thread = threading.Thread(target=engine)
    thread.start()
    started.wait()
    sent: list[Work] = [Ping(1, nonce) for nonce in range(100)]
    for ping in sent:
        inbox.put(ping)
    inbox.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [work for batch in batches for work in batch] == sent


def test_a_closed_inbox_gives_out_what_is_left_and_takes_no_more() -> None:
    inbox = Inbox()
    inbox.put(Ping(1, 1))
    inbox.close()
    inbox.put(Ping(1, 2))
    assert inbox.take() == [Ping(1, 1)]
    assert inbox.take() == []


def test_only_the_newest_anchor_of_a_session_drafts() -> None:
    old, new, other = entry(1, 4), entry(1, 6), entry(2)
    newest = newest_entries([step(1, 1, old, other), step(1, 2, new)])
    assert newest[1, 1] is new and newest[1, 2] is other


def test_another_anchor_at_the_same_or_a_lower_position_supersedes_too() -> None:
    guess, same, lower = entry(1, 6), Entry(1, 1, 6, 0, 2, anchor_id=9), entry(1, 4)
    assert newest_entries([step(1, 1, guess), step(1, 2, same)]) == {(1, 1): same}
    assert newest_entries([step(1, 1, guess), step(1, 2, lower)]) == {(1, 1): lower}


def test_waiting_work_supersedes_asks_only_if_it_does_all_of_them() -> None:
    inbox, asks = Inbox(), [(1, 1), (1, 2), (2, 1)]
    assert not inbox.supersedes(asks)
    inbox.put(step(1, 1, entry(1)))
    inbox.put(Ping(1, 0))
    assert inbox.supersedes(asks[:1]) and not inbox.supersedes(asks)
    inbox.put(step(1, 2, close=(2,)))
    assert inbox.supersedes(asks[:2]) and not inbox.supersedes(asks)
    inbox.put(LinkClosed(2))
    assert inbox.supersedes(asks)
    assert len(inbox.take()) == 4 and not inbox.supersedes(asks)


def test_closing_a_session_or_a_link_supersedes_its_asks() -> None:
    a, b, c = entry(1), entry(2), entry(1)
    assert newest_entries([step(1, 1, a, b), step(1, 2, close=(1,))]) == {(1, 2): b}
    assert newest_entries([step(1, 1, a), step(2, 1, c), LinkClosed(1)]) == {(2, 1): c}
    assert newest_entries([step(1, 1, a), step(1, 2, c, close=(1,))]) == {(1, 1): c}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2), st.lists(st.integers(1, 4), max_size=3)), max_size=8))
def test_every_open_session_keeps_exactly_one_ask(plan: list[tuple[int, list[int]]]) -> None:
    batch = [step(link, i, *map(entry, ids)) for i, (link, ids) in enumerate(plan)]
    newest = newest_entries(batch)
    for key, kept in newest.items():
        same = [e for s in batch for e in s.entries if (s.link, e.session_id) == key]
        assert same[-1] is kept
    assert len(newest) == len({(link, i) for link, ids in plan for i in ids})
