"""Ends a thread from the event loop without ever hanging on it. Knows no service."""

import asyncio
import contextlib
import threading
from collections.abc import Callable


async def stop_within(seconds: float, stop: Callable[[], None]) -> bool:
    """Calls `stop`, which blocks; False if it does not return in time: a step may hang in a device.

    It runs on a thread of its own that nobody waits for at exit, as an executor's would be.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        stop()
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=run, name="stop", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        return False
    return True
