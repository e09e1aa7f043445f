"""The bounded queue between engine and client, and the table of live requests; no socket."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from common.errors import AlreadyExists, InvalidRequest, Overloaded, SlowConsumer
from verifier_svc.events import Delta, Failed, Finished
from verifier_svc.request import (
    Counters,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Times,
)
from verifier_svc.stream import Stream, Streams

SLOW_S = 0.05


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_svc.stream.SLOW_AFTER_S", SLOW_S)


def request(name: str) -> Request:
    sampling, stopping, speculation = SamplingParams(), StopParams(), SpeculationParams()
    return Request(name, 1, [1], 1, sampling, stopping, speculation, frozenset(), 10)


def delta(name: str, token: int = 1) -> Delta:
    return Delta(name, (token,), "", (0,), 0)


def finished(name: str) -> Finished:
    return Finished(name, FinishReason.ABORT, "", 0, 1, 0, 0, "", Counters(), Times())


class Table:
    """Streams and what they asked the engine to abort."""

    def __init__(self, max_live: int = 4, max_events: int = 3) -> None:
        self.aborted: list[str] = []
        self.streams = Streams(
            max_live, max_events, lambda request: self.aborted.append(request.request_id)
        )

    async def open(self, name: str) -> Stream:
        stream = await self.streams.open(name)
        stream.request = request(name)
        return stream


def loop_test(check: Callable[[Table], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with asyncio.timeout(5):
                await check(Table())

        asyncio.run(main())

    run.__name__ = check.__name__
    return run


@loop_test
async def test_events_come_in_order_to_their_own_stream(table: Table) -> None:
    a, b = await table.open("a"), await table.open("b")
    table.streams.deliver([delta("a", 1), delta("b", 2), delta("a", 3)])
    end = finished("a")
    table.streams.deliver([end])
    assert [await a.next() for _ in range(3)] == [delta("a", 1), delta("a", 3), end]
    assert await b.next() == delta("b", 2)
    assert len(table.streams) == 1
    table.streams.leave(a)
    assert table.aborted == [], "what ended by itself is not aborted"


@loop_test
async def test_next_waits_for_an_event(table: Table) -> None:
    stream = await table.open("a")
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    table.streams.deliver([delta("a")])
    assert await waiting == delta("a")


@loop_test
async def test_a_failed_event_is_raised(table: Table) -> None:
    stream = await table.open("a")
    table.streams.deliver([delta("a"), Failed("a", InvalidRequest("no"))])
    assert await stream.next() == delta("a")
    with pytest.raises(InvalidRequest, match="no"):
        await stream.next()


@loop_test
async def test_a_client_that_takes_nothing_is_cut_and_its_request_aborted_once(
    table: Table,
) -> None:
    stream, other = await table.open("slow"), await table.open("other")
    stuck = asyncio.ensure_future(asyncio.sleep(60))  # a write that the client does not take
    stream.attach(stuck)
    table.streams.deliver([delta("slow", token) for token in range(3)])
    assert table.aborted == []
    await asyncio.sleep(SLOW_S)
    table.streams.deliver([delta("slow", 3), delta("other")])
    table.streams.deliver([delta("slow", 4)])
    assert table.aborted == ["slow"]
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert isinstance(stream.error, SlowConsumer) and "3 messages unread" in stream.error.message
    with pytest.raises(SlowConsumer):
        await stream.next()
    assert await other.next() == delta("other"), "nobody else is hurt"
    table.streams.leave(stream)
    assert table.aborted == ["slow"]
    table.streams.deliver([finished("slow")])
    assert len(table.streams) == 1


@loop_test
async def test_a_client_that_reads_is_not_cut_when_this_process_lags(table: Table) -> None:
    stream = await table.open("a")
    deadline, num_taken, num_given = time.monotonic() + 4 * SLOW_S, 0, 0
    while time.monotonic() < deadline:  # two come for each that is taken
        table.streams.deliver([delta("a", num_given), delta("a", num_given + 1)])
        assert await stream.next() == delta("a", num_taken)
        num_taken, num_given = num_taken + 1, num_given + 2
        await asyncio.sleep(SLOW_S / 10)
    assert num_given - num_taken > 3 and table.aborted == []


@loop_test
async def test_an_id_is_free_once_the_engine_has_let_go(table: Table) -> None:
    stream = await table.open("a")
    with pytest.raises(AlreadyExists, match="'a' is live"):
        await table.open("a")
    table.streams.leave(stream)
    assert table.aborted == ["a"]
    again = asyncio.ensure_future(table.open("a"))
    await asyncio.sleep(0.01)
    assert not again.done(), "its first holder is still in the engine"
    table.streams.deliver([delta("a"), finished("a")])
    second = await again
    table.streams.deliver([delta("a", 7)])
    assert await second.next() == delta("a", 7), "events of the first one never reach the second"


@loop_test
async def test_a_full_table_refuses_with_a_time_to_come_back(table: Table) -> None:
    held = [await table.open(name) for name in "abcd"]
    with pytest.raises(Overloaded, match="4 requests are running or queued") as caught:
        await table.open("e")
    assert caught.value.retry_after_ms
    table.streams.leave(held[0])
    with pytest.raises(Overloaded):
        await table.open("e")  # the engine still holds it
    table.streams.deliver([finished("a")])
    await table.open("e")


@loop_test
async def test_idle_waits_for_the_last_request(table: Table) -> None:
    await table.streams.idle()
    await table.open("a")
    await table.open("b")
    table.streams.abort_all()
    assert table.aborted == ["a", "b"]
    idle = asyncio.ensure_future(table.streams.idle())
    table.streams.deliver([finished("a")])
    await asyncio.sleep(0)
    assert not idle.done()
    table.streams.deliver([finished("b")])
    await idle
    assert table.streams.abort(["a", "zz"]) == []


@loop_test
async def test_a_call_that_is_refused_before_the_engine_frees_its_place(table: Table) -> None:
    stream = await table.streams.open("a")
    assert table.streams.abort(["a"]) == [], "there is nothing to abort yet"
    with pytest.raises(AlreadyExists):
        await table.streams.open("a")
    table.streams.leave(stream)
    assert table.aborted == [] and len(table.streams) == 0
    await table.streams.idle()
