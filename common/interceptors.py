"""Error class -> gRPC status, for every kind of call: nowhere else do exceptions become status.

A `DsparkError` ends the call with its status name (and google.rpc.RetryInfo if it may be retried);
any other exception is a bug: counted, logged with its traceback, and INTERNAL to the caller, never
UNKNOWN. Also counts and times every call. Knows no service.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from common.errors import DsparkError, InvalidRequest
from common.logs import fields
from common.telemetry import M, Telemetry

log = logging.getLogger(__name__)

# Status messages travel in metadata, twice and partly escaped: gRPC drops calls above 8 KiB of it.
MAX_MESSAGE_BYTES = 1800


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps coroutine and async-generator handlers of all four kinds."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler with errors turned into status, or None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        kind = _kind(handler)
        behaviour = self._guard(getattr(handler, kind), handler_call_details.method)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            behaviour,
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guard(self, behaviour: Any, method: str) -> Any:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                async with (
                    self._call(context, method),
                    aclosing(behaviour(_checked(request), context)) as responses,
                ):
                    async for response in responses:
                        yield response

            return stream
        assert inspect.iscoroutinefunction(behaviour), f"{method} is not an asyncio handler"

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._call(context, method):
                return await behaviour(_checked(request), context)

        return call

    @asynccontextmanager
    async def _call(self, context: grpc.aio.ServicerContext, method: str) -> AsyncIterator[None]:
        """Counts, times and, if it fails, aborts the call that runs in its body."""
        started, code = time.monotonic(), "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.AbortError:  # the handler chose its status itself
            chosen = context.code()
            code = getattr(chosen, "name", str(chosen))
            raise
        except DsparkError as error:
            code = error.status
            if not context.done():
                await abort(context, error)
        except grpc.aio.InternalError:
            code = "CANCELLED"  # a write waited for a client that left: gRPC has no better error
        except Exception as error:
            code = "INTERNAL"
            self._telemetry.record(M.INTERNAL_ERRORS, method=method)
            log.exception("bug in a call", extra=fields(method=method))
            note = f"internal error ({type(error).__name__}); the server's log has the details"
            await context.abort(grpc.StatusCode.INTERNAL, note)
        finally:
            self._telemetry.record(M.RPCS, method=method, code=code)
            self._telemetry.record(M.RPC_SECONDS, time.monotonic() - started, method=method)


async def abort(context: grpc.aio.ServicerContext, error: DsparkError) -> None:
    """Ends the call with `error`; a retryable one carries google.rpc.RetryInfo in its details."""
    status = to_status(error)
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.status)
    await context.abort(code, status.message, rpc_status.to_status(status).trailing_metadata)


def to_status(error: DsparkError) -> status_pb2.Status:
    """`error` as google.rpc.Status."""
    status = status_pb2.Status(
        code=getattr(grpc.StatusCode, error.status).value[0], message=_bounded(error.message)
    )
    if error.retry_after_ms is not None:
        seconds, ms = divmod(error.retry_after_ms, 1000)
        delay = duration_pb2.Duration(seconds=seconds, nanos=ms * 1_000_000)
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return status


def _bounded(message: str) -> str:
    """At most MAX_MESSAGE_BYTES of UTF-8: a message may quote what a peer sent, of any length."""
    raw = message.encode(errors="replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return raw.decode()
    half = MAX_MESSAGE_BYTES // 2 - 2
    return raw[:half].decode(errors="ignore") + "..." + raw[-half:].decode(errors="ignore")


class _Malformed:
    """Stands for bytes that are no message; gRPC itself would end the call with UNKNOWN."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return deserialize


def _checked(request: Any) -> Any:
    """The request, or the requests of a stream; InvalidRequest where one could not be parsed."""
    if isinstance(request, _Malformed):
        raise InvalidRequest(f"{request.reason}; send the message that the .proto file describes")
    return _all_checked(request) if isinstance(request, AsyncIterable) else request


async def _all_checked(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _kind(handler: grpc.RpcMethodHandler) -> str:
    sides = (
        "stream" if side else "unary"
        for side in (handler.request_streaming, handler.response_streaming)
    )
    return "_".join(sides)
