"""The engine's thread: submit, abort, idle, overload, stop and crash; every request ends once."""

import threading
import time
from collections.abc import Callable

import pytest

from common.errors import Overloaded, Unavailable
from common.testing.no_text import NoText
from verifier_svc.drafting import Drafts, FeatureSource, NoDrafter
from verifier_svc.events import Event, Failed, Finished
from verifier_svc.request import FinishReason, Plan, Request


class Inbox:
    """Collects events by request and lets a test wait for ends."""

    def __init__(self) -> None:
        self.events: list = []
        self._changed = threading.Condition()

    def extend(self, events: list) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def end_of(self, request: Request) -> Finished | Failed:
        def ends() -> list:
            mine = [e for e in self.events if e.request_id == request.request_id]
            return [e for e in mine if isinstance(e, Finished | Failed)]

        with self._changed:
            assert self._changed.wait_for(ends, timeout=10), "the request never ended"
        [end] = ends()
        return end


@pytest.fixture
def running(make_rig, tiny_models):
    """`running(**sizes)` -> a rig whose engine thread runs, and the inbox of its events."""
    rigs = []

    def start(drafter=None, **sizes):
        rig, inbox = make_rig(tiny_models()[0], None, drafter, **sizes), Inbox()
        rig.engine._emit = inbox.extend
        rig.engine.start()
        rigs.append(rig)
        return rig, inbox

    yield start
    for rig in rigs:
        rig.engine.stop()


def test_requests_of_several_threads_all_end(running) -> None:
    rig, inbox = running(max_running=3, max_batch_tokens=16)
    requests = [rig.ask(f"r{i}", [i + 1, 2], temperature=0.0, max_tokens=9) for i in range(12)]
    threads = [
        threading.Thread(target=lambda part: [rig.engine.submit(r) for r in part], args=(part,))
        for part in (requests[i::4] for i in range(4))
    ]
    for thread in threads:
        thread.start()
    for request in requests:
        assert isinstance(inbox.end_of(request), Finished)
    gauges = rig.engine.gauges()
    assert (gauges.num_running, gauges.num_waiting) == (0, 0)
    assert gauges.num_free_kv_blocks == gauges.num_kv_blocks
    assert rig.engine.problem(5.0) is None


def test_an_idle_engine_waits_without_working(running) -> None:
    rig, inbox = running()
    request = rig.ask("a", [1], temperature=0.0, max_tokens=2)
    rig.engine.submit(request)
    inbox.end_of(request)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    assert rig.engine.problem(0.01) is None


def test_abort_of_running_waiting_unknown_and_ended_requests(running) -> None:
    rig, inbox = running(max_running=1)
    running_one = rig.ask("a", [1], temperature=0.0, ignore_eos=True)
    waiting_one = rig.ask("b", [1], temperature=0.0, ignore_eos=True)
    rig.engine.submit(running_one)
    rig.engine.submit(waiting_one)
    rig.engine.abort(waiting_one)
    assert inbox.end_of(waiting_one).reason is FinishReason.ABORT
    rig.engine.abort(running_one)
    assert inbox.end_of(running_one).reason is FinishReason.ABORT
    rig.engine.abort(running_one)
    rig.engine.abort(rig.ask("c", [1]))
    last = rig.ask("d", [1], temperature=0.0, max_tokens=2)
    rig.engine.submit(last)
    assert inbox.end_of(last).reason is FinishReason.MAX_TOKENS
    assert rig.engine.gauges().num_free_kv_blocks == rig.engine.gauges().num_kv_blocks


def test_a_full_queue_refuses_with_a_time_to_come_back(make_rig, tiny_models) -> None:
    rig = make_rig(tiny_models()[0], max_running=2, max_waiting=1)
    requests = [rig.ask(f"r{i}", [1], temperature=0.0, max_tokens=2) for i in range(4)]
    for request in requests:
        rig.engine.submit(request)  # the thread does not run yet: all of them wait
    [refusal] = rig.events
    assert isinstance(refusal, Failed) and refusal.request_id == "r3"
    assert isinstance(refusal.error, Overloaded) and refusal.error.retry_after_ms
    rig.engine.start()
    rig.engine.stop()


def test_stop_ends_what_is_live_and_refuses_what_comes(running) -> None:
    rig, inbox = running()
    request = rig.ask("a", [1], temperature=0.0, ignore_eos=True)
    rig.engine.submit(request)
    rig.engine.stop()
    end = inbox.end_of(request)
    assert isinstance(end, Failed) and isinstance(end.error, Unavailable)
    assert "stopped" in (rig.engine.problem(1.0) or "")
    late = rig.ask("b", [1])
    rig.engine.submit(late)
    assert isinstance(inbox.end_of(late), Failed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_ends_every_request_and_the_engine_says_so(running) -> None:
    class Breaks(NoDrafter):
        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            if plan.step_id > 3:
                raise ZeroDivisionError("boom")
            return Drafts()

    rig, inbox = running(Breaks(), max_drafts=2, max_running=1)
    requests = [rig.ask(f"r{i}", [1], temperature=0.0, ignore_eos=True) for i in range(3)]
    for request in requests:
        rig.engine.submit(request)
    for request in requests:
        end = inbox.end_of(request)
        assert isinstance(end, Failed) and isinstance(end.error, Unavailable)
        assert "ZeroDivisionError" in end.error.message
    assert "crashed" in (rig.engine.problem(5.0) or "")
    late = rig.ask("late", [1])
    rig.engine.submit(late)
    assert isinstance(inbox.end_of(late), Failed)


def test_a_steps_events_are_told_while_the_next_one_waits_for_its_drafts(running) -> None:
    class Waits(NoDrafter):
        def __init__(self) -> None:
            self.meanwhile: Callable[[], None] = lambda: None
            self.sent: list[tuple[int, int]] = []  # step, events told before and while it waits

        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            before = len(told)
            self.meanwhile()
            self.sent.append((before, len(told)))
            return Drafts()

    drafter, told = Waits(), list[Event]()
    rig, inbox = running(drafter, max_drafts=2)
    drafter.meanwhile = rig.engine.flush
    emit = rig.engine._emit
    rig.engine._emit = lambda events: (told.extend(events), emit(events))
    request = rig.ask("a", [1], temperature=0.0, max_tokens=4, ignore_eos=True)
    rig.engine.submit(request)
    assert isinstance(inbox.end_of(request), Finished)
    assert drafter.sent == [(0, 0), (0, 1), (1, 2), (2, 3)]  # a delta each, one step later
    assert len(told) == 5  # the last delta and the end did not wait for a step that never comes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ended_in_the_turn_that_crashes_is_told_too(running) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    class BreaksOnAbort(NoDrafter):
        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            if plan.step_id == 3:
                stepping.set()
                go_on.wait(10)
            if plan.step_id > 3:
                raise ZeroDivisionError("boom")
            return Drafts()

    rig, inbox = running(BreaksOnAbort(), max_drafts=2)
    aborted, other = (rig.ask(name, [1], temperature=0.0, ignore_eos=True) for name in "ab")
    rig.engine.submit(aborted)
    rig.engine.submit(other)
    assert stepping.wait(10)
    rig.engine.abort(aborted)  # taken at the start of the turn whose step crashes
    go_on.set()
    assert isinstance(inbox.end_of(other), Failed)
    assert isinstance(inbox.end_of(aborted), Finished)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_in_the_middle_of_a_commit_ends_every_request(running) -> None:
    class Unreadable(NoText):
        def push(self, token_id: int) -> str:
            raise ZeroDivisionError("boom")

    rig, inbox = running()
    first, second = (rig.ask(name, [1], temperature=0.0, max_tokens=1) for name in "ab")
    rig.scheduler._decoder_for = lambda r: Unreadable() if r is second else NoText()
    with rig.engine._changed:  # both are taken in one turn
        rig.engine.submit(first)
        rig.engine.submit(second)
    for request in (first, second):
        assert isinstance(inbox.end_of(request), Failed)


def test_a_step_that_hangs_is_a_problem(running) -> None:
    go_on = threading.Event()

    class Hangs(NoDrafter):
        def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
            go_on.wait(10)
            return Drafts()

    rig, inbox = running(Hangs(), max_drafts=2)
    request = rig.ask("a", [1], temperature=0.0, max_tokens=2)
    rig.engine.submit(request)
    deadline = time.monotonic() + 5
    while rig.engine.problem(0.05) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.engine.problem(60.0) is None
    go_on.set()
    assert isinstance(inbox.end_of(request), Finished)
