"""DrafterService: verifiers' streams in, work for the engine thread, its answers back out.

Only this file and `wire.py` see wire types. Loop thread only, but for `_deliver`, which the engine
thread calls. No tensor is touched here: rows pass through as bytes.

What ends a stream: the peer (Bye, half-close, gone), a broken protocol, a dead engine, `close`.
Faults of one session never do. However a stream ends, the engine gets its LinkClosed.
"""

import asyncio
import itertools
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator

import grpc

from common.contract import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from common.errors import (
    ContractMismatch,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from common.health import PROCESS, Health
from common.logs import fields
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from common.telemetry import Telemetry
from common.tensors import itemsize
from common.threads import stop_within
from drafter_svc.batcher import LinkClosed, LinkOpened, Ping, RowForm
from drafter_svc.build import LoadedDrafter
from drafter_svc.engine import Evicted, Reply
from drafter_svc.engine_thread import EngineThread
from drafter_svc.wire import DTYPES, contract_from_pb, contract_to_pb, reply_to_pb, step_from_pb

log = logging.getLogger(__name__)

FULL_NAME = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
_ENTRY_ROOM_BYTES = 1 << 20  # of a message, kept free for what is not rows
_HELLO_TIMEOUT_S, _LAST_WRITES_S = 10.0, 0.5
_STOP_GRACE_S = 2.0  # for the batch in progress
_MAX_UNANSWERED = 16  # steps and pings of one verifier; then its stream is not read any further


class _Link:
    """One verifier's stream."""

    def __init__(self, number: int, verifier_id: str, form: RowForm, max_step_rows: int) -> None:
        self.number, self.verifier_id = number, verifier_id
        self.form, self.max_step_rows = form, max_step_rows
        self.last_step_id = 0
        self.credits = asyncio.Semaphore(_MAX_UNANSWERED)
        # Bounded by `credits`, but for eviction notices: at most one per session that was open.
        self.outbox: asyncio.Queue[tuple[pb.DraftResponse | None, bool] | None] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: pb.DraftResponse | None, *, answer: bool = False) -> None:
        """Queues one message; an `answer` gives its credit back once it is written.

        None: a step that is done without one, whose credit waits its turn all the same. Else a peer
        that reads nothing could go on for ever, and so would the notices that wait for it.
        """
        self.outbox.put_nowait((message, answer))

    def end(self, error: Unavailable) -> None:
        """Ends the stream with this error."""
        if not self.ended.done():
            self.ended.set_exception(error)


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one loaded drafter to up to `max_verifiers` verifiers."""

    full_name = FULL_NAME

    def __init__(
        self,
        drafter: LoadedDrafter,
        telemetry: Telemetry,
        *,
        max_verifiers: int,
        max_step_rows: int,
    ) -> None:
        self.failed = False  # the engine died: the process exits with an error
        self._drafter, self._max_verifiers = drafter, max_verifiers
        self._max_step_rows = max_step_rows
        self._drafter_id = f"{socket.gethostname()}:{os.getpid()}"
        self._incarnation = secrets.randbits(63)
        self._engine = EngineThread(drafter.engine, self._deliver, self._died, telemetry)
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    # Life, as `common.server.Service` has it.

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the handlers."""
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    async def start(self, health: Health) -> None:
        """Starts the engine thread and turns health on."""
        self._loop, self._health = asyncio.get_running_loop(), health
        self._engine.start()
        health.set(True, PROCESS, FULL_NAME)

    def stop_admission(self) -> None:
        """Tells every verifier to go elsewhere; their streams go on until they leave."""
        self._draining = True
        for link in self._links.values():
            link.send(pb.DraftResponse(drain=pb.Drain()))

    async def drained(self) -> None:
        """No verifier is connected any more."""
        await self._empty.wait()

    async def close(self) -> None:
        """Ends what streams are left with UNAVAILABLE, then the engine thread."""
        self._draining = True
        for link in self._links.values():
            link.end(Unavailable("the drafter stops; connect to another one"))
        await self._empty.wait()
        if not await stop_within(_STOP_GRACE_S, self._engine.stop):
            log.error("the engine's batch does not end; leaving it behind")

    # Calls.

    async def GetInfo(
        self, request: pb.GetDrafterInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDrafterInfoResponse:
        """What is loaded, and how full it is."""
        drafter = self._drafter
        return pb.GetDrafterInfoResponse(
            drafter_id=self._drafter_id,
            incarnation=self._incarnation,
            contract=contract_to_pb(drafter.contract),
            verdict_json=drafter.verdict_json,
            load_report_json=drafter.report.to_json(),
            max_sessions=drafter.limits.max_sessions,
            num_sessions=drafter.engine.num_sessions,
        )

    async def Draft(
        self, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One verifier's stream, from Hello to its end."""
        messages = aiter(requests)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {_HELLO_TIMEOUT_S} s") from None
        if first is None:
            return
        link = self._open(first)
        reader = asyncio.ensure_future(self._read(link, messages))
        writer = asyncio.ensure_future(_write(link, context))
        waits = (reader, writer, link.ended)
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            link.outbox.put_nowait(None)  # gRPC cannot send the status beside an unfinished write
            await asyncio.wait({writer}, timeout=_LAST_WRITES_S)
            for wait in waits:
                if wait in done:
                    return wait.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            self._close(link)

    def _open(self, first: pb.DraftRequest) -> _Link:
        """Checks the first message, admits the verifier and queues the Welcome."""
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequest(f"the first message is {first.WhichOneof('kind')!r}, not 'hello'")
        if self._draining:
            raise Unavailable("the drafter drains; connect to another one")
        form = self._agree(first.hello)
        if len(self._links) >= self._max_verifiers:
            raise Overloaded(
                f"{len(self._links)} verifiers are connected; raise --max-verifiers or use another"
            )
        row_bytes = form.width * itemsize(form.dtype)
        fitting = (MAX_MESSAGE_BYTES - _ENTRY_ROOM_BYTES) // row_bytes
        max_step_rows = min(self._max_step_rows, fitting)
        link = _Link(next(self._numbers), first.hello.verifier_id, form, max_step_rows)
        self._links[link.number] = link
        self._empty.clear()
        self._engine.inbox.put(LinkOpened(link.number))
        welcome = pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            drafter_id=self._drafter_id,
            incarnation=self._incarnation,
            max_sessions=self._drafter.limits.max_sessions_per_link,
            max_step_rows=max_step_rows,
            max_context_len=self._drafter.limits.max_context_len,
        )
        link.send(pb.DraftResponse(welcome=welcome))
        log.info("verifier joined", extra=fields(link=link.number, verifier=link.verifier_id))
        return link

    def _agree(self, hello: pb.Hello) -> RowForm:
        """The wire form of rows; ContractMismatch names every field that differs, both values."""
        drafter = self._drafter
        differing = drafter.contract.differences(contract_from_pb(hello.contract))
        if hello.protocol_version != PROTOCOL_VERSION:
            peer = hello.protocol_version
            differing.insert(0, f"protocol_version: {PROTOCOL_VERSION} here, {peer} at the peer")
        if hello.feature_form not in (pb.FEATURE_FORM_RAW_LAYERS, pb.FEATURE_FORM_PROJECTED):
            differing.append(f"feature_form: 1 or 2 here, {hello.feature_form} at the peer")
        if hello.feature_dtype not in DTYPES:
            differing.append(f"feature_dtype: 1 or 2 here, {hello.feature_dtype} at the peer")
        if differing:
            differing.append("start both on copies of the same two checkpoints")
            raise ContractMismatch("drafter and verifier do not fit: " + "; ".join(differing))
        projected = hello.feature_form == pb.FEATURE_FORM_PROJECTED
        width = drafter.contract.hidden_size if projected else drafter.feature_width
        return RowForm(projected, DTYPES[hello.feature_dtype], width)

    def _close(self, link: _Link) -> None:
        del self._links[link.number]
        self._engine.inbox.put(LinkClosed(link.number))
        if not self._links:
            self._empty.set()
        log.info("verifier left", extra=fields(link=link.number, verifier=link.verifier_id))

    async def _read(self, link: _Link, messages: AsyncIterator[pb.DraftRequest]) -> None:
        """Until Bye or half-close; InvalidRequest for a peer that breaks the protocol."""
        async for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "bye":
                return
            if kind not in ("step", "ping"):
                raise InvalidRequest(f"message {kind!r} after hello; step, ping or bye may come")
            await link.credits.acquire()
            if kind == "ping":
                self._engine.inbox.put(Ping(link.number, message.ping.nonce))
                continue
            step = step_from_pb(
                message.step,
                link.number,
                link.form,
                max_entries=self._drafter.limits.max_sessions_per_link,
                max_rows=link.max_step_rows,
            )
            if step.step_id <= link.last_step_id:
                raise InvalidRequest(f"step_id {step.step_id} must be above {link.last_step_id}")
            link.last_step_id = step.step_id
            self._engine.inbox.put(step)

    # From the engine thread.

    def _deliver(self, replies: list[Reply]) -> None:
        messages = [
            (reply.link, reply_to_pb(reply), not isinstance(reply, Evicted)) for reply in replies
        ]
        if messages:
            self._loop.call_soon_threadsafe(self._dispatch, messages)

    def _dispatch(self, messages: list[tuple[int, pb.DraftResponse | None, bool]]) -> None:
        for number, message, answer in messages:
            link = self._links.get(number)
            if link is not None:  # else it left in the meantime
                link.send(message, answer=answer)

    def _died(self) -> None:
        """The engine thread ends by an exception: this process cannot draft any more."""
        self.failed = True
        self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        log.critical("the engine died; the process stops")
        self._health.set(False, PROCESS, FULL_NAME)
        for link in self._links.values():
            link.end(Unavailable("the drafter's engine died"))
        signal.raise_signal(signal.SIGTERM)  # the ordinary way out, see common.server


async def _write(link: _Link, context: grpc.aio.ServicerContext) -> None:
    while (item := await link.outbox.get()) is not None:
        message, answer = item
        if message is not None:
            await context.write(message)
        if answer:
            link.credits.release()
