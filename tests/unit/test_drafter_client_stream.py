"""drafter_client.py against a scripted drafter on a Unix socket: late, dead, frozen, lying, full.

The test thread plays the engine; client and server share one loop on another thread. Every test
ends by proving that no task and no stream was left behind.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from common.contract import Contract
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from common.telemetry import Metric, Telemetry
from verifier_svc.draft_link import LinkSettings
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafts
from verifier_svc.request import (
    Entry,
    Plan,
    Request,
    SamplingMode,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

CONTRACT = Contract("llama", "qwen3_dspark", 8, 4, 100, (0, 2), 4, 98, "{}")
TIMEOUT_MS = 150.0
SLACK_S = 0.15  # a busy machine may be late; the bound must hold all the same
T = TypeVar("T")
Answer = Callable[[pb.Step], list[pb.DraftResponse]]


def drafts_for(entry: pb.Entry, **changes: Any) -> pb.Proposal:
    ids = (np.arange(entry.num_draft_tokens, dtype="<i4") + entry.anchor_id + 1) % 100
    good = {
        "session_id": entry.session_id,
        "epoch": entry.epoch,
        "base_len": entry.base_len + entry.num_rows,
        "status": pb.Proposal.STATUS_OK,
        "token_ids": ids.tobytes(),
        "confidence_logits": np.ones(len(ids), "<f4").tobytes(),
    }
    return pb.Proposal(**{**good, **changes})


def proposals(step: pb.Step, **changes: Any) -> pb.DraftResponse:
    entries = [drafts_for(entry, **changes) for entry in step.entries if entry.num_draft_tokens]
    return pb.DraftResponse(proposals=pb.Proposals(step_id=step.step_id, proposals=entries))


def good(step: pb.Step) -> list[pb.DraftResponse]:
    return [proposals(step)]


def silent(step: pb.Step) -> list[pb.DraftResponse]:
    return []


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Does what the test's `answer` says; keeps what it was sent."""

    def __init__(self, answer: Answer = good) -> None:
        self.answer, self.refusal = answer, ""
        self.reads, self.pongs = asyncio.Event(), True
        self.reads.set()
        self.welcome = {"max_sessions": 8, "max_step_rows": 64, "max_context_len": 400}
        self.hellos: list[pb.Hello] = []
        self.steps: list[pb.Step] = []
        self.pings = self.num_open = self.byes = 0
        self.context: grpc.aio.ServicerContext | None = None

    async def Draft(
        self, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext
    ) -> None:
        messages = aiter(requests)
        first = await anext(messages)
        self.hellos.append(first.hello)
        if self.refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self.num_open, self.context = self.num_open + 1, context
        try:
            await context.write(pb.DraftResponse(welcome=pb.Welcome(**self.welcome)))
            await self.reads.wait()
            async for message in messages:
                await self.reads.wait()
                await self._take(message, context)
                if message.HasField("bye"):
                    self.byes += 1
                    return
        finally:
            self.num_open -= 1

    async def _take(self, message: pb.DraftRequest, context: grpc.aio.ServicerContext) -> None:
        if message.HasField("step"):
            self.steps.append(message.step)
            for response in self.answer(message.step):
                await context.write(response)
        elif message.HasField("ping"):
            self.pings += 1
            if self.pongs:
                await context.write(pb.DraftResponse(pong=pb.Pong(nonce=message.ping.nonce)))


class Counts(Telemetry):
    """Remembers what was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        self.of[".".join([metric.name.removeprefix("dspark."), *labels.values()])] += int(value)


class Features:
    """Row p of request r is [r, p] in bytes."""

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        return b"".join(
            bytes([r.session_id, p]) for r, start, stop in spans for p in range(start, stop)
        )


def request(
    session_id: int = 1, prompt: int = 5, sampling: SamplingParams | None = None
) -> Request:
    sampling = sampling or SamplingParams(temperature=0.0)
    return Request(
        str(session_id), session_id, list(range(prompt + 1)), prompt, sampling, StopParams(),
        SpeculationParams(), frozenset(), 300, num_computed=prompt,
    )  # fmt: skip


def plan(*requests: Request) -> Plan:
    return Plan(1, tuple(Entry(r, r.num_computed, 1, True, 4) for r in requests))


class Rig:
    """Loop thread, client, and as many drafters in a row as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.address = f"unix:{folder}/d.sock"
        self.counts, self.changes = Counts(), list[bool]()
        settings = LinkSettings(self.address, draft_timeout_ms=TIMEOUT_MS, feature_dtype="bf16")
        self.client = self.on_loop(self._make(settings))
        self.server: grpc.aio.Server | None = None

    async def _make(self, settings: LinkSettings) -> DrafterClient:
        return DrafterClient(settings, CONTRACT, self.counts, self.changes.append)

    def on_loop(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def serve(self, answer: Answer = good, **settings: Any) -> FakeDrafter:
        async def start() -> FakeDrafter:
            fake = FakeDrafter(answer)
            for name, value in settings.items():
                setattr(fake, name, value)
            self.server = grpc.aio.server()
            drafter_pb2_grpc.add_DrafterServiceServicer_to_server(fake, self.server)
            self.server.add_insecure_port(self.address)
            await self.server.start()
            return fake

        return self.on_loop(start())

    def kill(self) -> None:
        if self.server is not None:
            self.on_loop(self.server.stop(0))
            self.server = None

    def connect(self, answer: Answer = good, **settings: Any) -> FakeDrafter:
        fake = self.serve(answer, **settings)
        self.on_loop(self.client.start())
        eventually(lambda: self.client.state != "absent")
        return fake

    def propose(self, *requests: Request) -> tuple[Drafts, float]:
        started = time.monotonic()
        drafts = self.client.propose(plan(*requests), Features())
        return drafts, time.monotonic() - started

    def suspend(self, *requests: Request) -> None:
        for _ in range(3):
            self.propose(*requests)
        assert self.client.state == "suspended"


def eventually(happens: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)

    async def tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    yield made
    made.on_loop(made.client.stop())
    assert made.client.state == "absent"
    made.kill()
    eventually(lambda: not made.on_loop(tasks()), 2.0)
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join(5)
    made.loop.close()


def test_a_round_carries_rows_up_and_drafts_down(rig: Rig) -> None:
    fake, req = rig.connect(), request(7)
    drafts, _ = rig.propose(req)
    assert drafts.by_session[7].token_ids == (6, 7, 8, 9)
    assert drafts.by_session[7].confidence_logits == (1.0,) * 4
    (entry,) = fake.steps[0].entries
    assert (entry.base_len, entry.num_rows, entry.num_draft_tokens) == (0, 5, 4)
    assert fake.steps[0].rows == b"\x07\x00\x07\x01\x07\x02\x07\x03\x07\x04"
    assert not entry.HasField("sampling")
    req.token_ids += [6, 7, 8]
    req.num_computed = 8
    rig.propose(req)
    assert fake.steps[1].rows == b"\x07\x05\x07\x06\x07\x07"
    assert fake.hellos[0].contract == pb.Contract(**vars(CONTRACT))
    assert fake.hellos[0].feature_form == pb.FEATURE_FORM_RAW_LAYERS
    assert rig.counts.of == {"feature_bytes": 16}
    assert rig.changes == [True]


def test_a_finished_request_is_closed_without_waiting_for_another_step(rig: Rig) -> None:
    fake, req = rig.connect(), request()
    rig.propose(req)
    rig.client.release(req)
    eventually(lambda: len(fake.steps) == 2)
    assert list(fake.steps[1].close_ids) == [1] and not fake.steps[1].entries


def test_sampling_wishes_reach_the_drafter(rig: Rig) -> None:
    fake = rig.connect()
    wishes = [
        SamplingParams(temperature=0.5, seed=2**63 + 1, mode=SamplingMode.COUPLED),
        SamplingParams(temperature=0.75, seed=9),
    ]
    rig.propose(*(request(i, sampling=wish) for i, wish in enumerate(wishes)))
    coupled, sampled = (entry.sampling for entry in fake.steps[0].entries)
    assert (coupled.mode, coupled.temperature, coupled.seed) == (3, 0.5, 2**63 + 1)
    assert (sampled.mode, sampled.temperature, sampled.seed) == (2, 0.75, 9)


def test_without_a_drafter_nothing_waits_and_one_that_comes_is_used(rig: Rig) -> None:
    rig.on_loop(rig.client.start())
    drafts, took = rig.propose(request())
    assert not drafts.by_session and took < 0.02
    rig.serve()
    eventually(lambda: rig.propose(request())[0].by_session)


def test_a_late_step_waits_no_longer_than_allowed_and_its_answer_is_dropped(rig: Rig) -> None:
    held: list[pb.Step] = []

    def hold_first(step: pb.Step) -> list[pb.DraftResponse]:
        held.append(step)
        return [] if len(held) == 1 else [proposals(held[0]), proposals(step)]

    rig.connect(hold_first)
    drafts, took = rig.propose(request())
    assert not drafts.by_session
    assert TIMEOUT_MS / 1e3 <= took < TIMEOUT_MS / 1e3 + SLACK_S
    drafts, took = rig.propose(request())
    assert drafts.by_session[1].token_ids == (6, 7, 8, 9) and took < TIMEOUT_MS / 1e3
    assert rig.counts.of["draft_late.timeout"] == 1
    assert rig.counts.of["stale_proposals"] == 1


def test_a_slow_drafter_is_suspended_and_its_pong_brings_it_back(rig: Rig) -> None:
    fake, req = rig.connect(silent, pongs=False), request()
    rig.suspend(req)
    num_steps = len(fake.steps)
    drafts, took = rig.propose(req)
    assert not drafts.by_session and took < 0.02
    eventually(lambda: fake.pings == 1)
    rig.propose(req)
    assert len(fake.steps) == num_steps  # nothing is sent while suspended
    rig.client.release(req)
    assert rig.client.state == "suspended"
    fake.answer = good
    assert fake.context is not None
    rig.on_loop(fake.context.write(pb.DraftResponse(pong=pb.Pong(nonce=1))))
    eventually(lambda: rig.propose(req)[0].by_session)
    assert rig.client.state == "drafting" and rig.changes == [True, False, True]
    assert list(fake.steps[num_steps].close_ids) == [1]  # what could not be said before


def test_a_frozen_drafter_stalls_nobody_and_thaws(rig: Rig) -> None:
    fake, req = rig.connect(), request()
    rig.propose(req)

    async def freeze() -> None:
        fake.reads.clear()

    async def thaw() -> None:
        fake.reads.set()

    rig.on_loop(freeze())
    started = time.monotonic()
    for _ in range(50):
        rig.propose(req)
    assert time.monotonic() - started < 3 * (TIMEOUT_MS / 1e3 + SLACK_S)
    rig.on_loop(thaw())
    eventually(lambda: rig.propose(req)[0].by_session)


def test_a_drafter_frozen_for_good_does_not_hold_up_the_end(rig: Rig) -> None:
    fake = rig.connect()

    async def freeze() -> None:
        fake.reads.clear()

    rig.on_loop(freeze())
    rig.propose(request())
    started = time.monotonic()
    rig.on_loop(rig.client.stop())
    assert time.monotonic() - started < 2.0


def test_death_in_the_middle_of_a_wait_ends_the_wait(rig: Rig) -> None:
    rig.connect(silent)
    killer = threading.Timer(0.02, rig.kill)
    killer.start()
    drafts, took = rig.propose(request())
    killer.join()
    assert not drafts.by_session and took < TIMEOUT_MS / 1e3
    assert rig.counts.of["draft_late.lost"] == 1


def test_a_restarted_drafter_gets_everything_again_from_row_0(rig: Rig) -> None:
    fake, req = rig.connect(), request()
    rig.propose(req)
    rig.kill()
    eventually(lambda: rig.client.state == "absent")
    again = rig.serve()
    eventually(lambda: rig.propose(req)[0].by_session)
    (before,), (after,) = fake.steps[0].entries, again.steps[0].entries
    assert after.base_len == 0 and after.num_rows == 5 and after.epoch > before.epoch
    assert rig.changes == [True, False, True]


def test_a_drafter_of_another_contract_is_never_used(rig: Rig) -> None:
    fake = rig.serve(refusal="block_size: 7 here, 4 at the peer")
    rig.on_loop(rig.client.start())
    eventually(lambda: len(fake.hellos) >= 2)
    drafts, took = rig.propose(request())
    assert not drafts.by_session and took < 0.02 and not fake.steps
    assert rig.counts.of["contract_mismatch"] >= 1 and rig.changes == []


LIES: dict[str, dict[str, Any]] = {
    "token outside": {"token_ids": np.array([100], "<i4").tobytes()},
    "too many": {"token_ids": np.arange(5, dtype="<i4").tobytes(), "confidence_logits": b""},
    "another epoch": {"epoch": 99},
    "another base": {"base_len": 4},
    "another session": {"session_id": 55},
    "unasked candidates": {"top_k": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_its_own_draft_only(rig: Rig, lie: str) -> None:
    def lying(step: pb.Step) -> list[pb.DraftResponse]:
        first, *others = step.entries
        told = [drafts_for(first, **LIES[lie]), *map(drafts_for, others)]
        return [pb.DraftResponse(proposals=pb.Proposals(step_id=step.step_id, proposals=told))]

    rig.connect(lying)
    drafts, took = rig.propose(request(1), request(2))
    assert list(drafts.by_session) == [2] and took < TIMEOUT_MS / 1e3
    assert rig.counts.of["bad_proposals"] == 1


def test_an_answer_to_no_question_is_dropped(rig: Rig) -> None:
    def chatty(step: pb.Step) -> list[pb.DraftResponse]:
        other = pb.Step(step_id=step.step_id + 40, entries=step.entries)
        return [proposals(other), proposals(step), proposals(step)]

    rig.connect(chatty)
    assert rig.propose(request())[0].by_session
    eventually(lambda: rig.client._link.inbox.qsize() == 1)  # type: ignore[union-attr]
    assert rig.propose(request())[0].by_session
    assert rig.counts.of["bad_proposals"] == 3


@pytest.mark.parametrize("status", ["STATUS_UNKNOWN_SESSION", "STATUS_BASE_MISMATCH"])
def test_a_lost_session_is_sent_again_in_the_next_step(rig: Rig, status: str) -> None:
    def forgetful(step: pb.Step) -> list[pb.DraftResponse]:
        if step.entries[0].base_len:
            return [proposals(step, status=pb.Proposal.Status.Value(status), token_ids=b"")]
        return good(step)

    fake, req = rig.connect(forgetful), request()
    assert rig.propose(req)[0].by_session
    assert not rig.propose(req)[0].by_session
    assert rig.propose(req)[0].by_session
    assert [step.entries[0].base_len for step in fake.steps] == [0, 5, 0]
    assert fake.steps[2].entries[0].epoch > fake.steps[1].entries[0].epoch


@pytest.mark.parametrize("status", ["STATUS_NO_ROOM", "STATUS_INVALID"])
def test_a_session_without_room_goes_undrafted_for_a_while(rig: Rig, status: str) -> None:
    def full(step: pb.Step) -> list[pb.DraftResponse]:
        return [proposals(step, status=pb.Proposal.Status.Value(status), token_ids=b"")]

    fake, req = rig.connect(full), request()
    rig.propose(req)
    for _ in range(10):
        assert not rig.propose(req)[0].by_session
    assert len(fake.steps) == 1
    fake.answer = good
    eventually(lambda: rig.propose(req)[0].by_session, 2.0)


def test_an_evicted_session_waits_and_starts_from_row_0(rig: Rig) -> None:
    def evicting(step: pb.Step) -> list[pb.DraftResponse]:
        notice = pb.DraftResponse(evicted=pb.Evicted(session_ids=[1, 77]))
        return [notice, *good(step)]

    fake, req = rig.connect(evicting), request()
    rig.propose(req)
    fake.answer = good
    assert not rig.propose(req)[0].by_session
    eventually(lambda: rig.propose(req)[0].by_session, 2.0)
    assert fake.steps[-1].entries[0].base_len == 0


def test_a_draining_drafter_is_left_politely(rig: Rig) -> None:
    fake = rig.connect(lambda step: [pb.DraftResponse(drain=pb.Drain())])
    drafts, took = rig.propose(request())
    assert not drafts.by_session and took < TIMEOUT_MS / 1e3
    eventually(lambda: fake.byes == 1 and fake.num_open <= 1)


def test_a_flood_while_the_engine_sleeps_ends_the_stream(rig: Rig) -> None:
    flood = [pb.DraftResponse(evicted=pb.Evicted(session_ids=[1]))] * 5000
    fake = rig.connect(lambda step: flood)
    link = rig.client._connector.link
    assert link is not None
    prompt = request()
    prompt.num_computed = 2
    # Rows only: `propose` waits for nothing, so nobody reads the inbox.
    rig.client.propose(Plan(1, (Entry(prompt, 2, 3, False, 0),)), Features())
    eventually(lambda: link.lost)
    assert len(fake.steps) == 1


def test_a_backlog_of_unanswered_steps_stops_the_sending(rig: Rig) -> None:
    fake, req = rig.connect(silent), request(prompt=250)
    prompt = Plan(1, (Entry(req, 200, 50, False, 0),))
    req.num_computed = 200
    for start in range(0, 200, 10):
        rig.client.propose(Plan(1, (Entry(req, start, 10, False, 0),)), Features())
    eventually(lambda: len(fake.steps) == 8)
    rig.client.propose(prompt, Features())
    assert len(fake.steps) == 8 and rig.client.state == "drafting"
    rig.propose(request(2))
    assert rig.counts.of["draft_late.backlog"] == 1


def test_stop_says_bye_and_leaves_no_stream(rig: Rig) -> None:
    fake = rig.connect()
    rig.propose(request())
    rig.on_loop(rig.client.stop())
    eventually(lambda: fake.byes == 1 and fake.num_open == 0)
