"""drafter_svc/service.py without sockets: how streams end, who waits for whom, what is left."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import DsparkError, InvalidRequest, Overloaded, Unavailable
from common.health import Health
from common.pb.v1 import drafter_pb2 as pb
from common.telemetry import Telemetry
from common.testing.tiny import tiny_drafter, tiny_target
from drafter_svc import build
from drafter_svc.config import DrafterConfig
from drafter_svc.planning import decide
from drafter_svc.service import FULL_NAME, DrafterService

torch.set_num_threads(1)


class Context:
    """A peer's reading side. `open` cleared: it reads nothing, as flow control has it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.DraftResponse] = asyncio.Queue()
        self.open, self.gone = asyncio.Event(), False
        self.open.set()

    async def write(self, message: pb.DraftResponse) -> None:
        await self.open.wait()
        if self.gone:
            raise RuntimeError("ExecuteBatchError, say")
        self.messages.put_nowait(message)

    async def next(self) -> pb.DraftResponse:
        async with asyncio.timeout(5):
            return await self.messages.get()


class Peer:
    """A peer's writing side, as a request iterator."""

    def __init__(self, *messages: pb.DraftRequest) -> None:
        self.queue: asyncio.Queue[pb.DraftRequest | None] = asyncio.Queue()
        self.num_read = 0
        for message in messages:
            self.queue.put_nowait(message)

    def say(self, message: pb.DraftRequest | None) -> None:
        """None ends the stream."""
        self.queue.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[pb.DraftRequest]:
        while (message := await self.queue.get()) is not None:
            self.num_read += 1
            yield message


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DrafterConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    target = tiny_target(folder / "target")
    draft = tiny_drafter(folder / "draft", target)
    return DrafterConfig(model=draft, target_model=target, dtype="fp32", kv_blocks=64)


Scene = Callable[[DrafterService], Awaitable[None]]


@pytest.fixture
def play(config: DrafterConfig) -> Callable[[Scene], DrafterService]:
    """Runs a scene on a started service, then proves that closing it leaves nothing."""

    def run(scene: Scene) -> DrafterService:
        async def main() -> DrafterService:
            drafter = build.load(config, decide(config))
            service = DrafterService(drafter, Telemetry(), max_verifiers=2, max_step_rows=8)
            health = Health(FULL_NAME)
            await service.start(health)
            assert health.serving(FULL_NAME)
            await scene(service)
            await service.close()
            assert drafter.engine.num_sessions == 0
            assert len(asyncio.all_tasks()) == 1
            return service

        return asyncio.run(main())

    return run


def hello(service: DrafterService) -> pb.DraftRequest:
    contract = pb.Contract(**vars(service._drafter.contract))
    return pb.DraftRequest(
        hello=pb.Hello(protocol_version=2, contract=contract, feature_form=1, feature_dtype=2)
    )


def step(step_id: int, base_len: int = 0) -> pb.DraftRequest:
    entry = pb.Entry(session_id=1, epoch=1, base_len=base_len, num_rows=1, num_draft_tokens=2)
    return pb.DraftRequest(step=pb.Step(step_id=step_id, entries=[entry], rows=bytes(4 * 32)))


async def settle(task: asyncio.Future[Any]) -> BaseException | None:
    """How the call ended."""
    await asyncio.wait({task}, timeout=5)
    assert task.done()
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def draft(service: DrafterService, peer: Peer, context: Context) -> asyncio.Task[None]:
    return asyncio.create_task(service.Draft(aiter(peer), context))  # type: ignore[arg-type]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_peer_that_reads_nothing_is_not_read_either(play: Any, quiet: bool) -> None:
    async def scene(service: DrafterService) -> None:
        context, steps = Context(), [step(i + 1, base_len=i) for i in range(60)]
        for message in steps[:-1] if quiet else ():
            message.step.quiet, message.step.entries[0].num_draft_tokens = True, 0
        peer = Peer(hello(service), *steps)
        context.open.clear()
        call = draft(service, peer, context)
        await asyncio.sleep(0.3)
        assert peer.num_read == 1 + 16 + 1  # hello, the unanswered limit, and one in hand
        other, heard = Peer(hello(service), step(1)), Context()
        draft(service, other, heard)
        assert (await heard.next()).HasField("welcome")
        assert (await heard.next()).HasField("proposals")  # nobody else is held up
        context.open.set()
        while (await context.next()).proposals.step_id != 60:
            pass
        call.cancel()
        assert isinstance(await settle(call), asyncio.CancelledError)
        other.say(None)

    play(scene)


def test_quiet_steps_are_answered_only_if_they_fail_and_hold_up_nobody(play: Any) -> None:
    async def scene(service: DrafterService) -> None:
        quiet = [step(i + 1, base_len=i) for i in range(41)]
        for message in quiet:
            message.step.quiet, message.step.entries[0].num_draft_tokens = True, 0
        quiet[-1].step.entries[0].base_len = 99
        other = step(42)
        other.step.entries[0].session_id = 2
        peer, context = Peer(hello(service), *quiet, other), Context()
        call = draft(service, peer, context)
        assert (await context.next()).HasField("welcome")
        failed, answered = (await context.next()).proposals, (await context.next()).proposals
        assert (failed.step_id, answered.step_id) == (41, 42)
        (refused,), (good,) = failed.proposals, answered.proposals
        assert refused.status == pb.Proposal.STATUS_BASE_MISMATCH and refused.base_len == 100
        assert good.status == pb.Proposal.STATUS_OK
        peer.say(None)
        assert await settle(call) is None and context.messages.empty()

    play(scene)


@pytest.mark.parametrize("way", ["half-close", "bye", "cancel", "write fails"])
def test_however_a_stream_ends_its_sessions_go(play: Any, way: str) -> None:
    async def scene(service: DrafterService) -> None:
        peer, context = Peer(hello(service), step(1)), Context()
        call = draft(service, peer, context)
        await context.next()
        assert (await context.next()).proposals.proposals[0].status == pb.Proposal.STATUS_OK
        assert service._drafter.engine.num_sessions == 1
        if way == "half-close":
            peer.say(None)
        elif way == "bye":
            peer.say(pb.DraftRequest(bye=pb.Bye()))
        elif way == "cancel":
            call.cancel()
        else:
            context.gone = True
            peer.say(step(2, base_len=1))
        error = await settle(call)
        assert isinstance(
            error,
            {"cancel": asyncio.CancelledError, "write fails": RuntimeError}.get(way, type(None)),
        )

    play(scene)


def test_a_drain_tells_verifiers_and_waits_until_they_left(play: Any) -> None:
    async def scene(service: DrafterService) -> None:
        peer, context = Peer(hello(service)), Context()
        call = draft(service, peer, context)
        await context.next()
        service.stop_admission()
        assert (await context.next()).HasField("drain")
        drained = asyncio.create_task(service.drained())
        late = draft(service, Peer(hello(service)), Context())
        assert isinstance(await settle(late), Unavailable)
        assert not drained.done()
        peer.say(step(1))
        assert (await context.next()).HasField("proposals")  # until it leaves, it is served
        peer.say(pb.DraftRequest(bye=pb.Bye()))
        assert await settle(call) is None
        await asyncio.wait_for(drained, 5)

    play(scene)


def test_closing_cuts_the_verifiers_that_stayed(play: Any) -> None:
    calls: list[asyncio.Task[None]] = []

    async def scene(service: DrafterService) -> None:
        context = Context()
        calls.append(draft(service, Peer(hello(service)), context))
        await context.next()

    play(scene)
    assert isinstance(calls[0].exception(), Unavailable)


def test_only_so_many_verifiers(play: Any) -> None:
    async def scene(service: DrafterService) -> None:
        peers = [Peer(hello(service)) for _ in range(3)]
        contexts = [Context() for _ in peers]
        calls = list(map(draft, [service] * 3, peers, contexts))
        assert isinstance(await settle(calls[2]), Overloaded)
        peers[0].say(None)
        assert await settle(calls[0]) is None
        again = Context()
        draft(service, Peer(hello(service)), again)
        assert (await again.next()).HasField("welcome")

    play(scene)


@pytest.mark.parametrize("reads_again", [True, False])
def test_the_end_waits_a_moment_for_the_write_in_progress(play: Any, reads_again: bool) -> None:
    async def scene(service: DrafterService) -> None:
        peer, context = Peer(hello(service)), Context()
        context.open.clear()
        call = draft(service, peer, context)
        await asyncio.sleep(0.05)
        peer.say(None)
        await asyncio.sleep(0.05)
        assert not call.done()
        if reads_again:
            context.open.set()
        assert await settle(call) is None
        assert context.messages.qsize() == reads_again

    play(scene)


def test_a_batch_that_hangs_cannot_hold_up_the_end(
    play: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("drafter_svc.service._STOP_GRACE_S", 0.1)
    go_on = threading.Event()

    async def scene(service: DrafterService) -> None:
        run = service._drafter.engine.run
        hangs = lambda *given: go_on.wait(10) and run(*given)  # noqa: E731
        monkeypatch.setattr(service._drafter.engine, "run", hangs)
        call = draft(service, Peer(hello(service)), Context())
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await service.close()
        assert time.monotonic() - started < 3
        assert isinstance(await settle(call), Unavailable)
        go_on.set()

    play(scene)
    assert "does not end" in caplog.text


def test_a_second_hello_breaks_the_protocol(play: Any) -> None:
    async def scene(service: DrafterService) -> None:
        call = draft(service, Peer(hello(service), hello(service)), Context())
        error = await settle(call)
        assert isinstance(error, InvalidRequest) and "'hello' after hello" in error.message

    play(scene)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_position_that_no_answer_can_name_ends_the_stream_not_the_engine(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)  # of a dead engine

    async def scene(service: DrafterService) -> None:
        call = draft(service, Peer(hello(service), step(1, base_len=2**32 - 1)), Context())
        error = await settle(call)
        assert isinstance(error, InvalidRequest) and "base_len 4294967295" in error.message
        context = Context()
        draft(service, Peer(hello(service), step(1)), context)
        assert (await context.next()).HasField("welcome")
        assert (await context.next()).proposals.proposals[0].status == pb.Proposal.STATUS_OK

    play(scene)


@pytest.mark.parametrize("field", ["entries", "close_ids"])
def test_a_step_names_no_more_sessions_than_a_verifier_may_hold(play: Any, field: str) -> None:
    async def scene(service: DrafterService) -> None:
        many = service._drafter.limits.max_sessions_per_link + 1
        sent = [pb.Entry(session_id=1)] if field == "entries" else [1]
        message = pb.DraftRequest(step=pb.Step(step_id=1, **{field: sent * many}))
        error = await settle(draft(service, Peer(hello(service), message), Context()))
        assert isinstance(error, InvalidRequest) and f"{many} {field}" in error.message

    play(scene)


def test_a_stream_that_never_says_hello_is_ended(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter_svc.service._HELLO_TIMEOUT_S", 0.05)

    async def scene(service: DrafterService) -> None:
        error = await settle(draft(service, Peer(), Context()))
        assert isinstance(error, DsparkError) and error.status == "DEADLINE_EXCEEDED"

    play(scene)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_ends_the_streams_and_the_process(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)

    async def scene(service: DrafterService) -> None:
        def broken(*arguments: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(service._drafter.engine, "_draft", broken)
        call = draft(service, Peer(hello(service), step(1)), Context())
        error = await settle(call)
        assert isinstance(error, DsparkError) and error.status == "UNAVAILABLE"
        monkeypatch.setattr(type(service._drafter.engine), "num_sessions", 0)

    service = play(scene)
    assert service.failed and raised == [signal.SIGTERM]
