"""The verifier's stream to its drafter, kept up on the loop thread: connect, greet, carry, again.

Knows the stream's life (Hello, Welcome, Ping, Drain, Bye) but nothing of sessions or drafts: those
are `drafter_client.py`'s, on the engine thread. The two meet at `DraftConnector.link` and at a
link's `send`, `probe` and `inbox` only.
"""

import asyncio
import itertools
import logging
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from common.contract import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Contract
from common.logs import fields
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from common.telemetry import M, Telemetry
from verifier_svc.rhythm import Rhythm

log = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0  # between attempts to connect
_LASTING_S = 1.0  # a stream that ends sooner is a failed attempt: the next one waits longer
_WELCOME_TIMEOUT_S = 3.0
_FAREWELL_TIMEOUT_S = 1.0  # for the drafter to close the stream after our Bye
_MAX_UNREAD = 4096  # messages while the engine is idle; a drafter that sends more is broken
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 15_000),  # servers of ours allow one in 10 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new attempt waits for no earlier one's back-off
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True)
class LinkSettings:
    """How the verifier uses its drafter."""

    address: str  # HOST:PORT or unix:PATH
    draft_timeout_ms: float = 100.0  # longest wait of one step
    breaker_after: int = 3  # late steps in a row before drafting is suspended
    projected: bool = False  # rows went through fc and hidden_norm here
    feature_dtype: str = "bf16"  # "bf16" or "fp32"
    top_k: int = 0  # candidates per sampled draft token; 0: the drafter's default
    look_ahead: bool = True  # what a step will probably lead to is told before it ends


class DraftLink:
    """One welcomed stream. All but `inbox` and `lost` belongs to the loop thread."""

    def __init__(
        self, welcome: pb.Welcome, on_change: Callable[[bool], None], *, wakes: bool
    ) -> None:
        """wakes: the path is woken before the next step is due."""
        self.welcome, self._on_change = welcome, on_change
        self.inbox: queue.SimpleQueue[pb.DraftResponse | None] = queue.SimpleQueue()  # None: lost
        self.lost = False
        self.answering = True  # loop thread: False from a suspension to the Pong that ends it
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[pb.DraftRequest] = asyncio.Queue()  # bounded by its sender
        self._nonces = itertools.count(1)
        self._awaited: int | None = None  # loop thread: nonce of the Ping without a Pong
        self._rhythm = Rhythm() if wakes else None
        self._waking: int | None = None  # nonce of the Ping that wakes the path, until its Pong
        self._wake_timer: asyncio.TimerHandle | None = None

    def send(self, message: pb.DraftRequest) -> None:
        """From any thread; messages leave in the order they were given."""
        self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: pb.DraftRequest) -> None:
        self._outbox.put_nowait(message)
        self._cancel_waking()
        if self._rhythm is not None:
            self._rhythm.sent(self._loop.time())

    def probe(self, delay_s: float) -> None:
        """From any thread: drafting is suspended until the Pong to a Ping sent in `delay_s`."""
        self._loop.call_soon_threadsafe(self._suspend, delay_s)

    def _suspend(self, delay_s: float) -> None:
        if not self.lost:
            self.answering = False
            self._on_change(False)
            self._loop.call_later(delay_s, self._probe)

    def _probe(self) -> None:
        self._awaited = self._ping()

    def _answered(self, proposals: pb.Proposals) -> None:
        """Between two steps the path falls asleep; a Ping just before the next one wakes it."""
        if self._rhythm is None:
            return
        self._cancel_waking()
        delay = self._rhythm.answered(self._loop.time(), proposals.queue_us / 1e6)
        if delay is not None and self._waking is None and self.answering:
            self._wake_timer = self._loop.call_later(delay, self._wake)

    def _wake(self) -> None:
        self._waking = self._ping()

    def _ping(self) -> int:
        """Returns the nonce that the Pong will carry."""
        nonce = next(self._nonces)
        self._outbox.put_nowait(pb.DraftRequest(ping=pb.Ping(nonce=nonce)))
        return nonce

    def _cancel_waking(self) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None

    async def write(self, call: "_Call") -> None:
        """Until cancelled or the stream breaks."""
        while True:
            await call.write(await self._outbox.get())

    async def read(self, call: "_Call") -> str:
        """Until the drafter closes the stream; returns why, for the log."""
        reason = "the drafter closed the stream"
        while True:
            message = await call.read()
            if not isinstance(message, pb.DraftResponse):  # end of stream
                return reason
            if message.HasField("pong"):
                if message.pong.nonce == self._waking:
                    self._waking = None
                if message.pong.nonce != self._awaited:
                    continue  # nobody waits for it: it must not end a suspension
                self._awaited, self.answering = None, True
                self._on_change(True)
            if message.HasField("drain") and not self.lost:
                reason = "the drafter drains"
                self.lose()
                self._outbox.put_nowait(pb.DraftRequest(bye=pb.Bye()))
            elif self.inbox.qsize() >= _MAX_UNREAD:
                return f"{_MAX_UNREAD} messages that nobody asked for"
            else:
                self.inbox.put(message)  # first of all: the engine may be waiting
                if message.HasField("proposals"):
                    self._answered(message.proposals)

    def lose(self) -> None:
        """Nothing will come any more; wakes an engine that waits."""
        if not self.lost:
            self.lost = True
            self._cancel_waking()
            self.inbox.put(None)


_Call = grpc.aio.StreamStreamCall[pb.DraftRequest, pb.DraftResponse]


class DraftConnector:
    """Keeps a link up for as long as it runs; `link` is None whenever there is none."""

    def __init__(
        self,
        settings: LinkSettings,
        contract: Contract,
        telemetry: Telemetry,
        on_change: Callable[[bool], None],
    ) -> None:
        self.link: DraftLink | None = None  # written on the loop thread, read by the engine thread
        self.reason = ""  # why the last stream ended or did not come about; loop thread
        self.refused = False  # that was a contract mismatch
        self._settings, self._contract = settings, contract
        self._telemetry, self._on_change = telemetry, on_change
        self._verifier_id = f"{socket.gethostname()}:{os.getpid()}"
        self._incarnation = secrets.randbits(63)
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Loop thread."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    async def stop(self) -> None:
        """Says Bye, waits a moment for the drafter to close, and leaves nothing behind."""
        self._stopping.set()
        if self._task is None:
            return
        if self.link is not None:
            self.link.send(pb.DraftRequest(bye=pb.Bye()))
            await asyncio.wait({self._task}, timeout=_FAREWELL_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        delay, told = _FIRST_DELAY_S, ""
        while not self._stopping.is_set():
            began = time.monotonic()
            welcomed, reason = await self._connect()
            self.reason = reason
            if welcomed and time.monotonic() - began >= _LASTING_S:
                delay, told = _FIRST_DELAY_S, ""
            if reason != told and not self._stopping.is_set():  # not once per attempt
                log.warning(
                    "no drafter; decoding goes on without drafts",
                    extra=fields(address=self._settings.address, reason=reason),
                )
                told = reason
            try:
                await asyncio.wait_for(self._stopping.wait(), delay)
            except TimeoutError:
                delay = min(2 * delay, _LONGEST_DELAY_S)

    async def _connect(self) -> tuple[bool, str]:
        """One stream from Hello to its end: whether it was welcomed, and why it ended."""
        channel = grpc.aio.insecure_channel(self._settings.address, options=_OPTIONS)
        call: _Call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
        link = None
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await call.write(pb.DraftRequest(hello=self._hello()))
                first = await call.read()
            if not isinstance(first, pb.DraftResponse) or not first.HasField("welcome"):
                return False, "the drafter's first message is no welcome"
            spoken = first.welcome.protocol_version
            if spoken != PROTOCOL_VERSION:
                self._refuse()
                return False, (
                    f"the drafter speaks protocol_version {spoken}, this verifier "
                    f"{PROTOCOL_VERSION}; run both from the same release"
                )
            # Rows that are sent ahead wake the path as well.
            wakes = not self._settings.look_ahead
            link = self.link = DraftLink(first.welcome, self._on_change, wakes=wakes)
            self.refused = False
            log.info("drafter joined", extra=fields(drafter=first.welcome.drafter_id))
            self._on_change(True)
            return True, await self._use(link, call)
        except TimeoutError:
            return False, f"no welcome within {_WELCOME_TIMEOUT_S} s"
        except grpc.aio.AioRpcError as error:
            self.refused = False
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._refuse()
            return link is not None, f"{error.code().name}: {error.details()}"
        finally:
            if link is not None:
                self.link = None
                link.lose()
                self._on_change(False)
            call.cancel()
            await channel.close()

    def _refuse(self) -> None:
        self.refused = True
        self._telemetry.record(M.CONTRACT_MISMATCH)

    async def _use(self, link: DraftLink, call: _Call) -> str:
        writer = asyncio.ensure_future(link.write(call))
        try:
            return await link.read(call)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _hello(self) -> pb.Hello:
        settings = self._settings
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=self._verifier_id,
            incarnation=self._incarnation,
            contract=pb.Contract(**vars(self._contract)),
            feature_form=(
                pb.FEATURE_FORM_PROJECTED if settings.projected else pb.FEATURE_FORM_RAW_LAYERS
            ),
            feature_dtype=_DTYPES[settings.feature_dtype],
        )


_DTYPES = {"bf16": pb.FEATURE_DTYPE_BF16, "fp32": pb.FEATURE_DTYPE_FP32}
