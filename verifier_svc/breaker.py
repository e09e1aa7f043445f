"""When to stop waiting for a drafter that is too slow, and when to try it again.

Pure: no clock, no I/O. DRAFTING -> (late steps in a row) -> SUSPENDED -> (its probe is answered) ->
TRIAL -> an in-time step: DRAFTING; a late one: SUSPENDED at once, and the next probe waits twice as
long. So a drafter that is always too slow costs one wait per probe, ever more rarely.
"""

import enum


class BreakerState(enum.Enum):
    """Whether steps are sent and waited for."""

    DRAFTING = "drafting"
    SUSPENDED = "suspended"
    TRIAL = "trial"


class Breaker:
    """Engine thread only."""

    def __init__(
        self, late_steps: int, first_probe_s: float = 0.25, longest_probe_s: float = 8.0
    ) -> None:
        self.state = BreakerState.DRAFTING
        self._late_steps, self._num_late = late_steps, 0
        self._first_probe_s, self._longest_probe_s = first_probe_s, longest_probe_s
        self._next_probe_s = first_probe_s

    @property
    def allows(self) -> bool:
        """Steps may be sent."""
        return self.state is not BreakerState.SUSPENDED

    def in_time(self) -> None:
        """A step was answered before its deadline: all is forgiven."""
        self.state, self._num_late = BreakerState.DRAFTING, 0
        self._next_probe_s = self._first_probe_s

    def late(self) -> float | None:
        """A step was not. Returns seconds until the probe to send, if this one suspends."""
        self._num_late += 1
        if self.state is BreakerState.DRAFTING and self._num_late < self._late_steps:
            return None
        self.state = BreakerState.SUSPENDED
        delay = self._next_probe_s
        self._next_probe_s = min(2 * delay, self._longest_probe_s)
        return delay

    def answered(self) -> None:
        """The probe came back: the next step decides."""
        self.state, self._num_late = BreakerState.TRIAL, 0
