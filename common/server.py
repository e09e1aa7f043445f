"""Serves one gRPC service on asyncio (uvloop): address, health, reflection, errors, SIGTERM drain.

The order matters: the address is claimed before weights are read, health turns SERVING after the
service started, and a drain turns health off before it refuses or ends anything. Knows no service.
"""

import asyncio
import errno
import gc
import logging
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import ServiceConfig
from common.errors import StartupError
from common.health import Health
from common.huge_pages import use_huge_pages
from common.interceptors import ErrorInterceptor
from common.logs import fields
from common.telemetry import Telemetry, start_telemetry

log = logging.getLogger(__name__)

MAX_UNIX_PATH_BYTES = 107  # sockaddr_un of Linux, less the closing zero
WATCH_GRACE_S = 0.2  # for health watchers, which never end by themselves

# Pings every 10 s are welcome, also without calls: idle generations and draft streams must survive
# proxies. SO_REUSEPORT off, so that a second server on a port fails instead of sharing it.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Service(Protocol):
    """What a service hands to `serve`. Every method is called on the loop thread."""

    full_name: str  # as in the .proto: its health and reflection name

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its handlers."""
        ...

    async def start(self, health: Health) -> None:
        """Starts its work; sets `full_name` and any names of its own, now and later."""
        ...

    def stop_admission(self) -> None:
        """New calls are refused with UNAVAILABLE from now on."""
        ...

    async def drained(self) -> None:
        """Returns when no call is left that the service would like to finish."""
        ...

    async def close(self) -> None:
        """Ends what is still running and delivers those ends, then stops threads. Called once."""
        ...


Build = Callable[[Telemetry], Service]


def serve(
    config: ServiceConfig,
    build: Build,
    *,
    name: str,
    health_names: tuple[str, ...],
    max_message_bytes: int,
    options: tuple[tuple[str, int], ...] = (),
) -> None:
    """Builds the service and serves it until a signal; `build` may raise StartupError.

    `health_names` are all names beside "" that will ever be answered.
    """
    limits = (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    )
    uvloop.run(_serve(config, build, name, health_names, (*_OPTIONS, *limits, *options)))


async def _serve(
    config: ServiceConfig,
    build: Build,
    name: str,
    health_names: tuple[str, ...],
    options: tuple[tuple[str, int], ...],
) -> None:
    telemetry = start_telemetry(
        name, otel=config.otel, metrics_port=config.metrics_port, metrics_host=config.metrics_host
    )
    try:
        server = grpc.aio.server(interceptors=[ErrorInterceptor(telemetry)], options=options)
        address = bind(server, config.listen)
        try:
            service = build(telemetry)
        except BaseException:
            _abandon_socket(config.listen)
            raise
        try:
            health = Health(*health_names)
            _register(server, service, health)
            # What was loaded lives as long as the process: no later collection walks it again.
            gc.collect()
            gc.freeze()
            if config.huge_pages:
                log.info("huge pages", extra=fields(num_bytes=use_huge_pages()))
            await server.start()
            await service.start(health)
            log.info("serving", extra=fields(address=address))
            await _until_signalled(service, health, config.drain_seconds)
        finally:
            await service.close()
            await server.stop(WATCH_GRACE_S)
        log.info("stopped")
    finally:
        telemetry.close()


def _register(server: grpc.aio.Server, service: Service, health: Health) -> None:
    service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    listed = (service.full_name, _HEALTH_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(listed, server)


_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


async def _until_signalled(service: Service, health: Health, drain_seconds: float) -> None:
    """First SIGTERM or SIGINT: drain. Second: cut at once."""
    loop = asyncio.get_running_loop()
    drain, cut = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (cut if drain.is_set() else drain).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await drain.wait()
    log.info("draining", extra=fields(seconds=drain_seconds))
    health.shut_down()
    service.stop_admission()
    work = asyncio.ensure_future(service.drained())
    second = asyncio.ensure_future(cut.wait())
    await asyncio.wait({work, second}, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in (work, second):
        task.cancel()


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Claims HOST:PORT or unix:PATH; returns it with the real port. Raises StartupError."""
    if listen.startswith("unix:"):
        _claim_socket(Path(listen.removeprefix("unix:")))
    else:
        _probe_port(listen)  # gRPC itself would only say "failed to bind"
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise StartupError(f"--listen {listen} cannot be served: {error}") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def _abandon_socket(listen: str) -> None:
    """gRPC removes the socket file of a server that was started, and of no other."""
    if listen.startswith("unix:"):
        Path(listen.removeprefix("unix:")).unlink(missing_ok=True)


def _probe_port(listen: str) -> None:
    """Raises StartupError unless HOST:PORT is of this machine and free."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise StartupError(f"--listen {listen!r} is neither HOST:PORT nor unix:PATH")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise StartupError(
            f"--listen {listen} cannot be served: {error.strerror}; "
            "stop the other server or choose another address"
        ) from error


def _claim_socket(path: Path) -> None:
    """Removes a stale socket file; a living server, or anything but a socket, is a StartupError."""
    if len(bytes(path)) > MAX_UNIX_PATH_BYTES:
        raise StartupError(
            f"--listen unix:{path} has {len(bytes(path))} bytes; a Unix socket path may have "
            f"{MAX_UNIX_PATH_BYTES}; use a shorter folder"
        )
    if not path.parent.is_dir():
        raise StartupError(f"--listen unix:{path}: folder {path.parent} does not exist; create it")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(
            f"--listen unix:{path} is an existing file, not a socket; choose another"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        code = probe.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        raise StartupError(
            f"--listen unix:{path} is in use by a running server; stop it or choose another path"
        )
    path.unlink()
