"""common/threads.py: a stop that returns, one that hangs, one that outlives its loop."""

import asyncio
import threading

from common.threads import stop_within


def test_a_stop_that_returns_is_waited_for() -> None:
    done = threading.Event()
    assert asyncio.run(stop_within(5.0, done.set))
    assert done.is_set()


def test_a_stop_that_hangs_is_left_alone_and_may_end_after_the_loop() -> None:
    go_on = threading.Event()
    before = set(threading.enumerate())
    assert not asyncio.run(stop_within(0.05, lambda: go_on.wait(10.0) or None))
    (hanging,) = set(threading.enumerate()) - before
    go_on.set()
    hanging.join(10.0)  # an exception in it fails this test
    assert not hanging.is_alive()
