"""The verifier's engine: one thread that runs step after step while requests are there.

Other threads may call submit, abort, gauges, problem and stop; all else belongs to its own thread.
Each step hands its events to `emit` in one call, once the next step is on its way to the drafter:
what clients read must not hold up what the drafter waits for. Knows no asyncio, grpc or torch.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from common.errors import DsparkError, Overloaded, Unavailable
from common.logs import fields
from verifier_svc.drafting import Drafter
from verifier_svc.events import Event, Failed, Finished, Gauges
from verifier_svc.foresight import Foresight
from verifier_svc.request import Plan, Request
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler
from verifier_svc.verify import Verifier
from verifier_svc.verify_len import VerifyLength

log = logging.getLogger(__name__)


class Engine:
    """Every submitted request ends with exactly one Finished or Failed, even if a step crashes.

    `emit` runs on the engine thread (for a request refused by `submit`, on the caller's).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter,
        verify_length: VerifyLength,
        emit: Callable[[list[Event]], None],
        max_waiting: int = 256,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self._verify_length = verify_length
        self._verifier = Verifier()
        self._foresight = Foresight(scheduler, self._verifier, drafter, runner.features)
        self._emit = emit
        self._max_waiting = max_waiting  # requests without a place among the running ones
        self._changed = threading.Condition()  # guards the next four
        self._added: deque[Request] = deque()
        self._aborted: list[Request] = []
        self._stopping = False
        self._problem: str | None = None
        self._turn_began: float | None = None  # monotonic; None while idle
        self._unended: dict[str, None] = {}  # taken requests whose end is not emitted; own thread
        self._pending: list[Event] = []  # not emitted yet; own thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Once, after construction."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues an admitted request; if there is no room or no engine, it ends with Failed."""
        with self._changed:
            error = self._refusal()
            if error is None:
                self._added.append(request)
                self._changed.notify()
        if error is not None:
            self._emit([Failed(request.request_id, error)])

    def abort(self, request: Request) -> None:
        """Ends a request with ABORT before the next step; nothing happens if it has ended."""
        with self._changed:
            self._aborted.append(request)
            self._changed.notify()

    def gauges(self) -> Gauges:
        """How full the engine is."""
        scheduler = self._scheduler
        return Gauges(
            len(scheduler.running),
            len(scheduler.waiting) + len(self._added),
            scheduler.kv_blocks.num_free,
            scheduler.kv_blocks.num_blocks,
        )

    def problem(self, stall_seconds: float) -> str | None:
        """Why the engine cannot serve, or None. A step that runs too long is a problem."""
        began = self._turn_began
        if self._problem is None and began is not None:
            seconds = time.monotonic() - began
            if seconds > stall_seconds:
                return f"the engine's step has been running for {seconds:.0f} s"
        return self._problem

    def stop(self) -> None:
        """Ends the thread after the step in progress; live requests get Failed. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _refusal(self) -> DsparkError | None:
        if self._problem is not None:
            return Unavailable(f"{self._problem}; try another replica")
        scheduler = self._scheduler
        places = self._max_waiting + scheduler.limits.max_running - len(scheduler.running)
        num_waiting = len(scheduler.waiting) + len(self._added)
        if num_waiting < places:
            return None
        return Overloaded(
            f"{num_waiting} requests are waiting, {self._max_waiting} may; try again later or on "
            "another replica"
        )

    # -- engine thread --------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan, draft, choose, forward, verify, commit. Needs a scheduler with work.

        While the forward runs, the drafter is told how it will probably end (`foresight.py`).
        """
        began = time.monotonic()
        plan = self._scheduler.plan()
        planned = time.monotonic()
        drafts = self._drafter.propose(plan, self._runner.features)
        self.flush()  # unless the drafter did while it waited
        drafted = time.monotonic()
        drafts = self._verify_length.choose(plan, drafts)
        watch = self._foresight.watch(plan, drafts)
        logits = self._runner.forward(plan, drafts, watch)
        computed = time.monotonic()
        verdicts = self._verifier.verify(logits, plan, drafts)
        if watch is not None:
            watch.ended(verdicts)
        verified = time.monotonic()
        rounds = _decoding(plan)
        events = self._scheduler.commit(plan, drafts, verdicts)
        ended = time.monotonic()
        for request in rounds:
            times = request.times
            times.draft_wait += drafted - planned
            times.drafter += min(drafts.drafter_s, drafted - planned)  # as the drafter has it
            times.forward += computed - drafted
            times.verify += verified - computed
            times.round += ended - began
        return events

    def flush(self) -> None:
        """Emits what the step before left; called when the next one is on its way."""
        events, self._pending = self._pending, []
        if events:
            self._emit(events)
        for event in events:
            if isinstance(event, Finished):
                del self._unended[event.request_id]

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        finally:
            self._end(sys.exception())

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to stop."""
        with self._changed:
            self._turn_began = None
            while not (self._stopping or self._added or self._aborted or self._scheduler.has_work):
                self._changed.wait()
            self._turn_began = time.monotonic()
            return not self._stopping

    def _turn(self) -> None:
        """Takes what was asked since the last step, then one step."""
        with self._changed:
            aborted, self._aborted = self._aborted, []
            while self._added:
                request = self._added.popleft()
                self._unended[request.request_id] = None
                self._scheduler.add(request)
        self._pending += [
            self._scheduler.abort(request) for request in aborted if self._scheduler.holds(request)
        ]
        if self._scheduler.has_work:
            self._pending = self.step()  # which emits what was pending
        if not self._scheduler.has_work:
            self.flush()

    def _end(self, crash: BaseException | None) -> None:
        """The last thing the thread does: nobody is left waiting."""
        self.flush()
        with self._changed:
            self._problem = (
                "the engine was stopped" if crash is None else f"the engine crashed: {crash!r}"
            )
            unended = [*self._unended, *(request.request_id for request in self._added)]
            self._added.clear()
        if crash is not None:
            trace = None if isinstance(crash, DsparkError) else crash  # ours say everything
            log.error(self._problem, exc_info=trace, extra=fields(num_live=len(unended)))
        error = Unavailable(f"{self._problem}; try another replica")
        if unended:
            self._emit([Failed(request_id, error) for request_id in unended])
        self._drafter.close()


def _decoding(plan: Plan) -> list[Request]:
    """The requests for which this step is a decode round; before commit changes them."""
    return [entry.request for entry in plan.entries if entry.request.decoding]
