"""A drafter client and a scripted drafter on a Unix socket.

The test thread plays the engine; client and server share one loop on another thread. Every test
ends by proving that no task and no stream was left behind.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from common.contract import PROTOCOL_VERSION, Contract
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from common.telemetry import Metric, Telemetry
from verifier_svc.draft_link import LinkSettings
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafts
from verifier_svc.request import (
    Entry,
    Outlook,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

CONTRACT = Contract("llama", "qwen3_dspark", 8, 4, 100, (0, 2), 4, 98, "{}")
PATIENT_S, HASTY_S = 2.0, 0.25  # draft timeouts: where answers come, and where they do not
SLACK_S = 0.25  # a busy machine may be late; the bound must hold all the same
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


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Does what the test's `answer` says; keeps what it was sent."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer, self.refusal, self.closes = answer or Rig.good, "", False
        self.reads, self.pongs = asyncio.Event(), True
        self.reads.set()
        self.welcome = {
            "protocol_version": PROTOCOL_VERSION,
            "max_sessions": 8,
            "max_step_rows": 64,
            "max_context_len": 400,
        }
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
            if self.closes:
                return
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

    @property
    def counts(self) -> bool:
        return True

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        if value:
            self.of[".".join([metric.name.removeprefix("dspark."), *labels.values()])] += int(value)


class Features:
    """Row p of request r is [r, p] in bytes."""

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        return b"".join(
            bytes([r.session_id, p]) for r, start, stop in spans for p in range(start, stop)
        )


class Rig:
    """Loop thread, client, and as many drafters in a row as a test wants."""

    def __init__(self, folder: Path, timeout_s: float, *, look_ahead: bool = True) -> None:
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.address = f"unix:{folder}/d.sock"
        self.counts, self.changes = Counts(), list[bool]()
        settings = LinkSettings(
            self.address,
            draft_timeout_ms=timeout_s * 1e3,
            feature_dtype="bf16",
            look_ahead=look_ahead,
        )
        self.client = self.on_loop(self._make(settings))
        self.server: grpc.aio.Server | None = None

    async def _make(self, settings: LinkSettings) -> DrafterClient:
        return DrafterClient(settings, CONTRACT, self.counts, self.changes.append)

    @staticmethod
    def request(
        session_id: int = 1, prompt: int = 5, sampling: SamplingParams | None = None
    ) -> Request:
        sampling = sampling or SamplingParams(temperature=0.0)
        return Request(
            str(session_id), session_id, list(range(prompt + 1)), prompt, sampling, StopParams(),
            SpeculationParams(), frozenset(), 300, num_computed=prompt,
        )  # fmt: skip

    @staticmethod
    def plan(*requests: Request) -> Plan:
        return Plan(1, tuple(Entry(r, r.num_computed, 1, True, 4) for r in requests))

    @staticmethod
    def eventually(happens: Callable[[], object], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not happens():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)

    @staticmethod
    def good(step: pb.Step) -> list[pb.DraftResponse]:
        """Answers every ask; a quiet step has none."""
        return [] if step.quiet else [proposals(step)]

    @staticmethod
    def silent(step: pb.Step) -> list[pb.DraftResponse]:
        """Answers nothing."""
        return []

    proposals, drafts_for = staticmethod(proposals), staticmethod(drafts_for)
    Features, CONTRACT, SLACK_S = Features, CONTRACT, SLACK_S

    def on_loop(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def serve(self, answer: Answer | None = None, **settings: Any) -> FakeDrafter:
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

    def connect(self, answer: Answer | None = None, **settings: Any) -> FakeDrafter:
        fake = self.serve(answer, **settings)
        self.on_loop(self.client.start())
        self.eventually(lambda: self.state == "READY")
        return fake

    @property
    def state(self) -> str:
        return self.client.status().state

    def propose(self, *requests: Request) -> tuple[Drafts, float]:
        started = time.monotonic()
        drafts = self.client.propose(self.plan(*requests), Features())
        return drafts, time.monotonic() - started

    def look_ahead(self, *outlooks: Outlook) -> None:
        self.client.look_ahead(outlooks, Features())

    @property
    def num_waiting(self) -> int:
        """Messages that the engine has not read."""
        link = self.client._link
        return 0 if link is None else link.inbox.qsize()

    def suspend(self, *requests: Request) -> None:
        for _ in range(3):
            self.propose(*requests)
        self.eventually(lambda: self.state == "SUSPENDED")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A client that waits as long as a busy machine needs."""
    with lasting(Rig(tmp_path, PATIENT_S)) as made:
        yield made


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Rig]:
    """A client that soon stops waiting."""
    with lasting(Rig(tmp_path, HASTY_S)) as made:
        yield made


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Rig]:
    """As `rig`, but it says nothing before a step has ended."""
    with lasting(Rig(tmp_path, PATIENT_S, look_ahead=False)) as made:
        yield made


@contextmanager
def lasting(made: Rig) -> Iterator[Rig]:
    """Stops everything afterwards and proves that no task is left."""

    async def tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    yield made
    made.on_loop(made.client.stop())
    assert made.state == "CONNECTING"
    made.kill()
    made.eventually(lambda: not made.on_loop(tasks()), 2.0)
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join(5)
    made.loop.close()
