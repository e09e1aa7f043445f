"""The service in front of an engine that the test plays: crashes, stalls, spans, slow clients."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import Unavailable
from common.health import Health
from common.interceptors import ErrorInterceptor
from common.pb.v1 import verifier_pb2 as pb
from common.pb.v1 import verifier_pb2_grpc
from common.telemetry import M, Metric, S, Telemetry
from verifier_svc.admission import Admission, Limits
from verifier_svc.drafting import DrafterStatus
from verifier_svc.events import Delta, Event, Failed, Finished, Gauges
from verifier_svc.observing import Observer
from verifier_svc.request import FinishReason, Request
from verifier_svc.service import DRAFT_PATH, ModelInfo, VerifierService


class PlayedEngine:
    """Holds what was submitted; the test says what happens."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.trouble: str | None = None
        self.deliver: Callable[[list[Event]], None]
        self.hang = threading.Event()  # stop() waits while it is cleared
        self.hang.set()

    def start(self) -> None:
        pass

    def submit(self, request: Request) -> None:
        self.live[request.request_id] = request

    def abort(self, request: Request) -> None:
        self.aborted.append(request.request_id)
        if self.live.pop(request.request_id, None):
            self.deliver([finished(request, FinishReason.ABORT)])

    def gauges(self) -> Gauges:
        return Gauges(len(self.live), num_waiting=0, num_free_kv_blocks=1, num_kv_blocks=1)

    def problem(self, stall_seconds: float) -> str | None:
        return self.trouble

    def stop(self) -> None:
        self.hang.wait(20)


class PlayedDraftPath:
    state = "CONNECTING"

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def status(self) -> DrafterStatus:
        return DrafterStatus(self.state, "unix:/d", "why")


class Tokens:
    """A tokenizer of one token a character."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * len(text)


class Spans(Telemetry):
    """Keeps spans and values instead of exporting them."""

    traces = counts = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.values: list[tuple[Metric, float]] = []

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        self.values.append((metric, value))

    def span(self, name: str, start: float, end: float, **facts: Any) -> None:
        self.seen.append((name, facts))


def delta(request: Request, text: str = "x") -> Delta:
    return Delta(request.request_id, (1,), text, (len(text),), 0)


def finished(request: Request, reason: FinishReason = FinishReason.EOS) -> Finished:
    request.finish_reason = reason
    request.times.finished = time.monotonic()
    return Finished(
        request.request_id, reason, "", 0, request.num_prompt, 0, 0, "", request.counters,
        request.times,
    )  # fmt: skip


class Rig:
    def __init__(self, stub: Any, service: Any, engine: Any, health: Health, spans: Spans) -> None:
        self.stub, self.service, self.engine = stub, service, engine
        self.health, self.spans, self.draft_path = health, spans, service._draft_path

    async def running(self, call: Any) -> Request:
        """The one request that the engine holds, once the client has its Started."""
        assert (await call.read()).HasField("started")
        (request,) = self.engine.live.values()
        return request


@asynccontextmanager
async def rig(folder: Path) -> AsyncIterator[Rig]:
    engine, spans = PlayedEngine(), Spans()
    health = Health(*VerifierService.health_names)
    service = VerifierService(
        engine,
        Admission(Limits(100, 100_000, frozenset())),
        Tokens(),  # type: ignore[arg-type]
        ModelInfo("m", "{}", "{}"),
        Observer(spans, "m"),
        PlayedDraftPath(),
        max_live=4,
        max_stream_events=8,
        stall_seconds=1.0,
    )
    engine.deliver = service.deliver
    server = grpc.aio.server(interceptors=[ErrorInterceptor(Telemetry())])
    service.register(server)
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    await service.start(health)
    async with (
        asyncio.timeout(20),
        grpc.aio.insecure_channel(f"unix:{folder}/s") as channel,
    ):
        yield Rig(verifier_pb2_grpc.VerifierServiceStub(channel), service, engine, health, spans)
    await service.close()
    await server.stop(0)


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not happen within 5 s")


def test_an_engine_that_crashes_ends_its_streams_and_the_health(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            assert r.health.serving() and r.health.serving(VerifierService.full_name)
            call = r.stub.Generate(pb.GenerateRequest(text="a"))
            request = await r.running(call)
            r.engine.trouble = "the engine crashed: KeyError(3)"
            r.service.deliver([Failed(request.request_id, Unavailable("the engine crashed"))])
            assert (await status_of(call)).code() is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(0.3)
            assert not r.health.serving() and not r.health.serving(VerifierService.full_name)
            refused = await status_of(r.stub.Generate(pb.GenerateRequest(text="a")))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert "crashed: KeyError(3); try another replica" in (refused.details() or "")
            r.engine.trouble = None  # a stall that has passed
            await asyncio.sleep(0.3)
            assert r.health.serving()

    asyncio.run(check())


def test_the_draft_path_has_a_health_of_its_own(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            assert not r.health.serving(DRAFT_PATH) and r.health.serving()
            for state, serving in (("READY", True), ("SUSPENDED", False), ("REFUSED", False)):
                r.draft_path.state = state
                await asyncio.sleep(0.25)
                assert r.health.serving(DRAFT_PATH) is serving and r.health.serving()
                info = await r.stub.GetInfo(pb.GetVerifierInfoRequest())
                assert pb.DrafterStatus.State.Name(info.drafter.state) == f"STATE_{state}"
                assert (info.drafter.address, info.drafter.detail) == ("unix:/d", "why")

    asyncio.run(check())


def test_a_slow_client_gets_its_status_even_while_a_write_is_stuck(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            call = r.stub.Generate(pb.GenerateRequest(text="a", request_id="slow"))
            request = await r.running(call)
            while not r.engine.aborted:  # no limit: gRPC buffers some megabytes for a client
                r.service.deliver([delta(request, "x" * 100_000)])
                await asyncio.sleep(0)
            assert r.engine.aborted == ["slow"] and not r.engine.live
            error = await status_of(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "messages unread" in (error.details() or "")

    asyncio.run(check())


def test_a_client_that_leaves_during_a_stuck_write_is_no_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            call = r.stub.Generate(pb.GenerateRequest(text="a"))
            request = await r.running(call)
            for _ in range(200):  # 20 MB: more than gRPC takes, in steps that the queue holds
                if r.service._streams._by_id[request.request_id]._events:
                    break
                r.service.deliver([delta(request, "x" * 100_000)])
                await asyncio.sleep(0.005)
            call.cancel()
            await until(lambda: not r.engine.live)
            assert r.engine.aborted == [request.request_id]

    asyncio.run(check())
    assert not [record for record in caplog.records if "bug" in record.message]


def test_a_request_leaves_a_span_under_its_callers(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            call = r.stub.Generate(
                pb.GenerateRequest(text="abc"), metadata=(("traceparent", parent),)
            )
            request = await r.running(call)
            request.times.scheduled = request.times.arrived + 0.5
            request.times.first_token = request.times.arrived + 1.0
            r.service.deliver([finished(request)])
            assert (await call.read()).HasField("finished")
            await call.code()
            ((name, facts),) = r.spans.seen
            assert name == S.GENERATE and ("traceparent", parent) in tuple(facts["metadata"])
            assert facts["attributes"]["gen_ai.usage.input_tokens"] == 3
            assert facts["attributes"]["dspark.finish_reason"] == "eos"
            assert [child[0] for child in facts["children"]][:2] == [S.QUEUE, S.PREFILL]
            await status_of(r.stub.Generate(pb.GenerateRequest()))  # refused: not a request
            assert len(r.spans.seen) == 1

    asyncio.run(check())


def test_drafts_of_a_request_whose_client_left_are_counted(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            call = r.stub.Generate(pb.GenerateRequest(text="a"))
            request = await r.running(call)
            request.counters.num_draft_tokens = 7
            call.cancel()
            await until(lambda: not r.engine.live)
            assert r.spans.values.count((M.DRAFT_TOKENS, 7)) == 1
            assert (M.REQUEST_SUCCESS, 1) in r.spans.values

    asyncio.run(check())


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            room = r.service._admission.limits.max_context_len
            encode, sizes = r.service._tokenizer.encode, list[int]()

            def measured(text: str, special: bool) -> list[int]:
                sizes.append(len(text))
                return encode(text, special)

            r.service._tokenizer.encode = measured
            refused = await status_of(r.stub.Generate(pb.GenerateRequest(text="ab " * 700_000)))
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"over {2 * room} tokens long; allowed: at most {room - 1}" in refused.details()
            assert 0 < max(sizes) <= 16 * room

    asyncio.run(check())


def test_prompts_being_tokenised_count_against_the_limit(tmp_path: Path) -> None:
    async def check() -> None:
        async with rig(tmp_path) as r:
            release = threading.Event()
            r.service._tokenizer.encode = lambda text, special: [release.wait(10) or 1] and [1]
            long = pb.GenerateRequest(text="a" * 5_000)
            calls = [r.stub.Generate(long) for _ in range(4)]
            await until(lambda: len(r.service._streams) == 4)
            fifth = await status_of(r.stub.Generate(long))
            assert fifth.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            await until(lambda: len(r.service._streams) == 3)
            r.service.stop_admission()
            release.set()
            for call in calls[1:]:
                assert (await status_of(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert not r.engine.live and len(r.service._streams) == 0

    asyncio.run(check())


def test_a_step_that_hangs_cannot_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verifier_svc.service.CUT_GRACE_S", 0.1)

    async def check() -> None:
        async with rig(tmp_path) as r:
            r.engine.hang.clear()
            started = time.monotonic()
            await r.service.close()
            assert time.monotonic() - started < 2
            r.engine.hang.set()
            await asyncio.sleep(0.1)

    asyncio.run(check())
    assert "does not end" in caplog.text
