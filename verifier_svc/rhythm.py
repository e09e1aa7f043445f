"""When the path to the drafter is to be woken, so that the next step finds it awake.

Pure: callers pass the time. Where nothing is told ahead, nothing passes between the two services
while the target runs: their threads sleep, their code leaves the caches and idle cores halt. A
small message shortly before the next step wakes all that in time. The last pause between an answer
and the step after it tells when that step is due.
"""

AHEAD_S = 0.002  # of 0.5 to 4 ms, all wake; sooner and it has fallen asleep again
SHORTEST_PAUSE_S = 2 * AHEAD_S  # nothing falls asleep in less
BUSY_S = 0.0003  # a step that queued for so long found a drafter that others keep awake


class Rhythm:
    """Of one link."""

    def __init__(self) -> None:
        self._answered_at: float | None = None
        self._pause_s = 0.0

    def sent(self, now: float) -> None:
        """A step left."""
        if self._answered_at is not None:
            self._pause_s = now - self._answered_at
            self._answered_at = None

    def answered(self, now: float, queued_s: float) -> float | None:
        """An answer came whose step the drafter let wait for `queued_s`.

        Returns seconds from now at which to wake the path, or None if there is no need.
        """
        self._answered_at = now
        if self._pause_s < SHORTEST_PAUSE_S or queued_s >= BUSY_S:
            return None
        return self._pause_s - AHEAD_S
