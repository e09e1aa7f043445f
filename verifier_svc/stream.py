"""Between engine and client: a bounded queue of events per request, and the table of live ones.

Loop thread only. Knows neither torch, grpc nor protobuf.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from common.errors import AlreadyExists, DsparkError, Overloaded, SlowConsumer
from verifier_svc.events import Event, Failed, Finished
from verifier_svc.request import Request

SLOW_AFTER_S = 1.0  # a client that takes nothing for so long, with a full queue, is cut


class Stream:
    """One request's events on their way to its client.

    The engine never waits for a client. A request whose client leaves `max_events` unread and takes
    none for a second is ended with SlowConsumer; while the client does take them, it is this
    process that lags, and the queue may grow, at most to the request's own length.
    """

    def __init__(self, request_id: str, max_events: int) -> None:
        self.request_id = request_id
        self.request: Request | None = None  # set by the service just before it submits it
        self.ended = asyncio.Event()  # the engine has let go of the request
        self._events: deque[Event] = deque()
        self._max_events = max_events
        self._reader: asyncio.Task[object] | None = None
        self._wakeup = asyncio.Event()
        self._taken = time.monotonic()  # when the reader last came for an event
        self._error: DsparkError | None = None
        self._detached = False

    @property
    def error(self) -> DsparkError | None:
        """Why the stream was cut, if it was."""
        return self._error

    def attach(self, reader: "asyncio.Task[object]") -> None:
        """From now on, `reader` is cancelled when the stream is cut: it may wait for its client."""
        self._reader = reader

    @property
    def detached(self) -> bool:
        """Nobody reads any more."""
        return self._detached

    def detach(self) -> None:
        """The client is gone: later events are dropped."""
        self._detached = True
        self._events.clear()

    def push(self, event: Event) -> bool:
        """Adds an event; False when the client is so far behind that the stream is now cut."""
        if self._detached:
            return True
        full = len(self._events) >= self._max_events
        if full and time.monotonic() - self._taken >= SLOW_AFTER_S:
            num_unread = len(self._events)
            self.detach()
            self._error = SlowConsumer(
                f"request {self.request_id!r} was ended: the client left {num_unread} messages "
                f"unread and took none for {SLOW_AFTER_S:g} s; read the stream as it comes"
            )
            if self._reader is not None:
                self._reader.cancel()  # it hangs in a write that the client does not take
            return False
        self._events.append(event)
        self._wakeup.set()
        return True

    async def next(self) -> Event:
        """The next event, in order. Raises the error of a cut stream or of a Failed event."""
        if self._error is not None:
            raise self._error
        self._taken = time.monotonic()
        while not self._events:
            self._wakeup.clear()
            await self._wakeup.wait()
        event = self._events.popleft()
        if isinstance(event, Failed):
            raise event.error
        return event


class Streams:
    """All calls that are admitted or about to be, by id; `abort` makes the engine drop one."""

    def __init__(self, max_live: int, max_events: int, abort: Callable[[Request], None]) -> None:
        self._by_id: dict[str, Stream] = {}
        self._max_live, self._max_events = max_live, max_events
        self._abort = abort
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    async def open(self, request_id: str) -> Stream:
        """Takes the id and a place among `max_live`. Raises AlreadyExists or Overloaded.

        An id whose client has just left is waited for: one engine step at most.
        """
        while (live := self._by_id.get(request_id)) is not None:
            if not live.detached:
                raise AlreadyExists(
                    f"request_id {request_id!r} is live; wait for its end, abort it, or choose "
                    "another id"
                )
            await live.ended.wait()
        if len(self._by_id) >= self._max_live:
            raise Overloaded(
                f"{len(self._by_id)} requests are running or queued, which is all that is allowed; "
                "try again later or on another replica"
            )
        stream = self._by_id[request_id] = Stream(request_id, self._max_events)
        self._idle.clear()
        return stream

    def deliver(self, events: Iterable[Event]) -> None:
        """Hands one step's events to their streams."""
        for event in events:
            stream = self._by_id.get(event.request_id)
            assert stream is not None, f"event for {event.request_id!r}, which ended before"
            if not stream.push(event):
                self._drop(stream)
            if isinstance(event, Finished | Failed):
                self._remove(stream)

    def leave(self, stream: Stream) -> None:
        """The call is over: the engine drops the request unless that ended by itself."""
        if stream.request is None:
            self._remove(stream)  # it was refused before the engine knew of it
        elif not stream.ended.is_set() and not stream.detached:
            stream.detach()
            self._drop(stream)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Asks the engine to end these; their streams get Finished with ABORT. Returns the live."""
        live = [self._by_id[i] for i in request_ids if i in self._by_id]
        return [stream.request_id for stream in live if self._drop(stream)]

    def abort_all(self) -> None:
        """Asks the engine to end everything."""
        self.abort(list(self._by_id))

    async def idle(self) -> None:
        """Returns when no call is left."""
        await self._idle.wait()

    def _drop(self, stream: Stream) -> bool:
        if stream.request is None:
            return False  # still being admitted
        self._abort(stream.request)
        return True

    def _remove(self, stream: Stream) -> None:
        del self._by_id[stream.request_id]
        stream.ended.set()
        if not self._by_id:
            self._idle.set()
