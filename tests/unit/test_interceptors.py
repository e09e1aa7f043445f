"""Every exception class ends as its status, for every kind of call, over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from common import errors
from common.health import Health
from common.interceptors import ErrorInterceptor
from common.telemetry import M, Metric, Telemetry


class Counts(Telemetry):
    """Keeps what was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Metric, dict[str, str]]] = []

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        self.seen.append((metric, labels))


class Service:
    """Raises what the request asks for: a DsparkError class, a bug, or nothing."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def fail(self, request: bytes) -> None:
        name = request.decode()
        if name == "bug":
            raise KeyError("a bug")
        if name == "endless":
            raise errors.InvalidRequest("name " + "\u00e9" * 100_000 + "; choose another")
        if name:
            raise getattr(errors, name)(f"{name} happened")

    async def uu(self, request: bytes, context: Any) -> bytes:
        self.fail(request)
        return b"ok"

    async def us(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            if request == b"hang":
                await asyncio.sleep(60)
            self.fail(request)
        finally:
            self.closed.set()

    async def us_write(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        self.fail(request)

    async def su(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            self.fail(request)
        return b"ok"

    async def ss(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.fail(request)
            yield request

    async def chosen(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "chosen")
        return b""


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[grpc.aio.Channel, Counts, Service]]:
    service, counts = Service(), Counts()
    handlers = {
        "uu": grpc.unary_unary_rpc_method_handler(service.uu),
        "us": grpc.unary_stream_rpc_method_handler(service.us),
        "us_write": grpc.unary_stream_rpc_method_handler(service.us_write),
        "su": grpc.stream_unary_rpc_method_handler(service.su),
        "ss": grpc.stream_stream_rpc_method_handler(service.ss),
        "chosen": grpc.unary_unary_rpc_method_handler(service.chosen),
    }
    server = grpc.aio.server(interceptors=[ErrorInterceptor(counts)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
        yield channel, counts, service
    await server.stop(0)


async def one(message: bytes) -> AsyncIterator[bytes]:
    yield message


Call = Callable[[grpc.aio.Channel, bytes], Awaitable[Any]]


async def call_uu(channel: grpc.aio.Channel, message: bytes) -> Any:
    return await channel.unary_unary("/t/uu")(message)


async def call_us(channel: grpc.aio.Channel, message: bytes) -> Any:
    return [r async for r in channel.unary_stream("/t/us")(message)]


async def call_us_write(channel: grpc.aio.Channel, message: bytes) -> Any:
    return [r async for r in channel.unary_stream("/t/us_write")(message)]


async def call_su(channel: grpc.aio.Channel, message: bytes) -> Any:
    return await channel.stream_unary("/t/su")(one(message))


async def call_ss(channel: grpc.aio.Channel, message: bytes) -> Any:
    return [r async for r in channel.stream_stream("/t/ss")(one(message))]


CALLS = [call_uu, call_us, call_us_write, call_su, call_ss]


@pytest.mark.parametrize("call", CALLS)
def test_each_error_class_becomes_its_status(call: Call, tmp_path: Path) -> None:
    async def check() -> None:
        async with served(tmp_path) as (channel, counts, _):
            await call(channel, b"")
            for cls in errors.DsparkError.__subclasses__():
                if cls is errors.ConfigError:
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, cls.__name__.encode())
                assert caught.value.code().name == cls.status
                assert caught.value.details() == f"{cls.__name__} happened"
                rich = rpc_status.from_call(caught.value)
                if cls.retry_after_ms is None:
                    assert not rich.details
                else:
                    info = error_details_pb2.RetryInfo()
                    assert rich.details[0].Unpack(info)
                    assert info.retry_delay.ToMilliseconds() == cls.retry_after_ms
            codes = [labels["code"] for metric, labels in counts.seen if metric is M.RPCS]
            assert codes[0] == "OK" and "ALREADY_EXISTS" in codes

    asyncio.run(check())


@pytest.mark.parametrize("call", CALLS)
def test_a_message_that_quotes_an_endless_name_keeps_its_status_and_ends(
    call: Call, tmp_path: Path
) -> None:
    async def check() -> None:
        async with served(tmp_path) as (channel, _, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, b"endless")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = caught.value.details() or ""
            assert details.startswith("name \u00e9") and details.endswith("; choose another")

    asyncio.run(check())


@pytest.mark.parametrize("call", CALLS)
def test_a_bug_is_internal_counted_and_logged(
    call: Call, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with served(tmp_path) as (channel, counts, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, b"bug")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "KeyError" in (caught.value.details() or "")
            assert "a bug" not in (caught.value.details() or "")
            assert M.INTERNAL_ERRORS in [metric for metric, _ in counts.seen]

    asyncio.run(check())
    assert any(r.exc_info and "bug in a call" in r.message for r in caplog.records)


def test_a_cancelled_stream_closes_its_generator_at_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(tmp_path) as (channel, counts, service):
            call = channel.unary_stream("/t/us")(b"hang")
            assert await call.read() == b"first"
            call.cancel()
            await asyncio.wait_for(service.closed.wait(), 5)
            await asyncio.sleep(0.05)
            assert (M.RPCS, {"method": "/t/us", "code": "CANCELLED"}) in counts.seen
            assert M.INTERNAL_ERRORS not in [metric for metric, _ in counts.seen]

    asyncio.run(check())


def test_bytes_that_are_no_message_are_the_callers_fault(tmp_path: Path) -> None:
    """Health has real messages: one unary call, and reflection is a stream of requests."""

    async def check() -> None:
        counts = Counts()
        server = grpc.aio.server(interceptors=[ErrorInterceptor(counts)])
        health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
        reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            unary = channel.unary_unary("/grpc.health.v1.Health/Check")
            stream = channel.stream_stream(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")
            for call in (unary(b"\xff\xff"), stream(one(b"\xff\xff")).read()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "Error parsing message" in (caught.value.details() or "")
        await server.stop(0)

    asyncio.run(check())


def test_a_status_that_the_handler_chose_stays(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(tmp_path) as (channel, counts, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t/chosen")(b"")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert (M.RPCS, {"method": "/t/chosen", "code": "NOT_FOUND"}) in counts.seen
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/t/nothing")(b"")
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(check())
