"""grpc.health.v1 with a live Watch: one status per name, every watcher told of every change.

Written out because the library's asyncio servicer keeps one condition per name and drops it when
the first of several watchers leaves, after which the others hear nothing more. Knows no service.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROCESS = ""  # the name that probes ask for when they name no service
_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Loop thread only. Names start NOT_SERVING; unknown names are NOT_FOUND (Check) or
    SERVICE_UNKNOWN (Watch), as the protocol says."""

    def __init__(self, *names: str) -> None:
        self._serving = dict.fromkeys((PROCESS, *names), False)
        self._changed = asyncio.Event()
        self._shut_down = False

    def set(self, serving: bool, *names: str) -> None:
        """Sets the names; ignored after `shut_down`."""
        if self._shut_down:
            return
        for name in names:
            assert name in self._serving, f"health name {name!r} was not declared"
            self._serving[name] = serving
        self._tell()

    def shut_down(self) -> None:
        """All names are NOT_SERVING from now on."""
        self._shut_down = True
        self._serving = dict.fromkeys(self._serving, False)
        self._tell()

    def serving(self, name: str = PROCESS) -> bool:
        """The current answer for `name`."""
        return self._serving[name]

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            known = ", ".join(repr(name) for name in self._serving)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}; known: {known}"
            )
        return _Status(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Status(status=status)
            else:
                await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._serving:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving[name] else _Status.NOT_SERVING

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
