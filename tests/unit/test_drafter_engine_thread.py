"""drafter_svc/engine_thread.py: what it records of a batch, and how it ends."""

import threading
from typing import Any

import pytest

from common.telemetry import M, Metric, Telemetry
from drafter_svc.batcher import Ping, Step, Work
from drafter_svc.engine import Evicted, Reply, StepReply, Superseded
from drafter_svc.engine_thread import EngineThread


class PlayedEngine:
    """Answers every step at once; a Ping is more than it can take."""

    num_sessions = 3

    def run(self, batch: list[Work], superseded: Superseded) -> list[Reply]:
        if any(isinstance(work, Ping) for work in batch):
            raise ZeroDivisionError("boom")
        steps = [StepReply(1, w.step_id, [], 0.25, 0.5, 0.75) for w in batch if isinstance(w, Step)]
        return [Evicted(1, (7, 8)), *steps]

    def catch_up(self) -> None:
        pass

    def take_counts(self) -> dict[str, int]:
        return {"stale": 2, "superseded": 1}


class Recorder(Telemetry):
    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[Metric, float, dict[str, str]]] = []

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        self.values.append((metric, value, labels))


def run(*batch: Work) -> tuple[list[Reply], list[str], Recorder]:
    replies, deaths, recorder = list[Reply](), list[str](), Recorder()
    engine: Any = PlayedEngine()

    def died() -> None:
        deaths.append(threading.current_thread().name)

    thread = EngineThread(engine, replies.extend, died, recorder)
    for work in batch:
        thread.inbox.put(work)
    thread.start()
    thread.stop()
    return replies, deaths, recorder


def test_one_batch_is_recorded_once_and_its_queueing_by_step() -> None:
    steps = [Step(1, number, (), b"", None) for number in (1, 2)]  # type: ignore[arg-type]
    replies, deaths, recorder = run(*steps)
    assert [type(reply) for reply in replies] == [Evicted, StepReply, StepReply] and not deaths
    assert recorder.values == [
        (M.EVICTIONS, 2, {}),
        (M.DRAFT_STEP, 0.25, {"part": "queue"}),
        (M.DRAFT_STEP, 0.25, {"part": "queue"}),
        (M.DRAFT_STEP, 0.5, {"part": "ingest"}),
        (M.DRAFT_STEP, 0.75, {"part": "draft"}),
        (M.UNDRAFTED, 2, {"reason": "stale"}),
        (M.UNDRAFTED, 1, {"reason": "superseded"}),
        (M.SESSIONS, 3, {}),
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_ends_the_thread_and_is_told() -> None:
    assert run(Ping(1, 9))[1] == ["drafter-engine"]


def test_a_stop_is_no_death() -> None:
    assert run()[1] == []
