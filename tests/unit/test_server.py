"""The server shell: claiming addresses, live health, reflection, and the order of a drain."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.config import ServiceConfig
from common.errors import StartupError, Unavailable
from common.health import Health
from common.server import bind, serve
from common.telemetry import Telemetry

NAME = "dspark.v1.VerifierService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Scenario = Callable[["Echo", grpc.aio.Channel], Awaitable[None]]


class Echo:
    """A service with one call that runs until told; its `scenario` is the client."""

    full_name = NAME

    def __init__(self, address: str, scenario: Scenario) -> None:
        self.address, self.scenario = address, scenario
        self.finish, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.admitting, self.num_running, self.happened = True, 0, list[str]()
        self.outcome: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {"Wait": grpc.unary_unary_rpc_method_handler(self.wait)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))

    async def wait(self, request: bytes, context: Any) -> bytes:
        if not self.admitting:
            raise Unavailable("draining")
        self.num_running += 1
        self.idle.clear()
        await self.finish.wait()
        self.num_running -= 1
        self.idle.set()
        return b"done"

    async def start(self, health: Health) -> None:
        health.set(True, "", NAME)
        self.health = health
        self.outcome = asyncio.create_task(self.client())

    async def client(self) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            try:
                await self.scenario(self, channel)
            finally:
                if self.admitting:
                    os.kill(os.getpid(), signal.SIGTERM)

    def stop_admission(self) -> None:
        self.happened.append("stop_admission")
        assert not self.health.serving(), "health goes off before calls are refused"
        self.admitting = False

    async def drained(self) -> None:
        await self.idle.wait()
        self.happened.append("drained")

    async def close(self) -> None:
        self.happened.append("close")
        self.finish.set()
        assert self.outcome is not None
        await asyncio.wait({self.outcome}, timeout=5)


def play(folder: Path, scenario: Scenario, **settings: Any) -> Echo:
    """Serves until the scenario ends; re-raises what the scenario raised."""
    address = f"unix:{folder}/s"
    made: list[Echo] = []

    def build(telemetry: Telemetry) -> Echo:
        made.append(Echo(address, scenario))
        return made[0]

    config = ServiceConfig(listen=address, **settings)
    serve(config, build, name="t", health_names=(NAME, "draft-path"), max_message_bytes=1 << 20)
    outcome = made[0].outcome
    assert outcome is not None
    outcome.result()
    assert not (folder / "s").exists(), "the socket file is removed"
    return made[0]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


def test_a_drain_lets_running_calls_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async def scenario(service: Echo, channel: grpc.aio.Channel) -> None:
        wait: Any = channel.unary_unary("/t/Wait")
        running = asyncio.ensure_future(wait(b""))
        await until(lambda: service.num_running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: not service.admitting)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await wait(b"")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        service.finish.set()
        assert await running == b"done"

    service = play(tmp_path, scenario)
    assert service.happened == ["stop_admission", "drained", "close"]


@pytest.mark.parametrize("second_signal", [True, False])
def test_a_drain_ends_by_time_or_by_a_second_signal(tmp_path: Path, second_signal: bool) -> None:
    async def scenario(service: Echo, channel: grpc.aio.Channel) -> None:
        running = asyncio.ensure_future(channel.unary_unary("/t/Wait")(b""))
        await until(lambda: service.num_running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: not service.admitting)
        if second_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 5) == b"done"
        assert service.happened[-1] == "close"

    service = play(tmp_path, scenario, drain_seconds=60.0 if second_signal else 0.05)
    assert service.happened == ["stop_admission", "close"]


def test_a_build_that_fails_leaves_no_socket_behind(tmp_path: Path) -> None:
    def build(telemetry: Telemetry) -> Echo:
        assert (tmp_path / "s").exists(), "the address is claimed before anything is loaded"
        raise StartupError("no weights")

    with pytest.raises(StartupError, match="no weights"):
        config = ServiceConfig(listen=f"unix:{tmp_path}/s")
        serve(config, build, name="t", health_names=(NAME,), max_message_bytes=1 << 20)
    assert not (tmp_path / "s").exists()


def test_every_watcher_hears_every_change(tmp_path: Path) -> None:
    async def scenario(service: Echo, channel: grpc.aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="draft-path")
        first, second = stub.Watch(asked), stub.Watch(asked)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for watch in (first, second):
            assert (await watch.read()).status == NOT_SERVING
        first.cancel()
        service.health.set(True, "draft-path")
        assert (await second.read()).status == SERVING
        assert (await stub.Check(asked)).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await stub.Check(health_pb2.HealthCheckRequest(service="x"))
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await second.read()).status == NOT_SERVING

    play(tmp_path, scenario)


def test_reflection_lists_the_service(tmp_path: Path) -> None:
    async def scenario(service: Echo, channel: grpc.aio.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await call.read()
        names = {found.name for found in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names

    play(tmp_path, scenario)


def test_a_stale_socket_is_replaced_but_never_a_living_one_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def check() -> None:
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        server, other = grpc.aio.server(), grpc.aio.server()
        assert bind(server, f"unix:{path}") == f"unix:{path}"
        await server.start()
        with pytest.raises(StartupError, match="in use by a running server"):
            bind(other, f"unix:{path}")
        assert path.exists()
        await server.stop(0)
        (tmp_path / "file").write_text("precious")
        with pytest.raises(StartupError, match="existing file"):
            bind(other, f"unix:{tmp_path}/file")
        assert (tmp_path / "file").read_text() == "precious"
        await other.stop(0)

    asyncio.run(check())


def test_addresses_that_cannot_be_served_are_refused() -> None:
    async def check() -> None:
        server = grpc.aio.server()
        bad = {
            "nonsense": "neither HOST:PORT",
            "127.0.0.1:99999": "neither HOST:PORT",
            f"unix:/tmp/{'x' * 110}": "may have 107",
            "unix:/no/such/folder/s": "does not exist",
            "192.0.2.1:50051": "cannot be served",
        }
        for listen, message in bad.items():
            with pytest.raises(StartupError, match=message):
                bind(server, listen)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(StartupError, match="in use"):
                bind(server, f"127.0.0.1:{taken.getsockname()[1]}")
        assert bind(server, "127.0.0.1:0").removeprefix("127.0.0.1:") != "0"
        await server.stop(0)

    asyncio.run(check())
