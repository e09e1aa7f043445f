"""The drafter's one compute thread: inbox -> engine -> replies, until the inbox closes.

Knows neither the model nor gRPC. An exception in the engine is a bug or a dead device: the thread
ends and says so, and the process must end too, since nobody else can compute.
"""

import logging
import threading
from collections.abc import Callable

from common.errors import RankLost
from common.telemetry import M, Telemetry
from drafter_svc.batcher import Inbox
from drafter_svc.engine import DraftEngine, Evicted, Reply, StepReply

log = logging.getLogger(__name__)


class EngineThread:
    """Started once; `deliver` and `died` are called on this thread."""

    def __init__(
        self,
        engine: DraftEngine,
        deliver: Callable[[list[Reply]], None],
        died: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self.inbox = Inbox()
        self._engine, self._deliver, self._died = engine, deliver, died
        self._telemetry = telemetry
        self._thread = threading.Thread(target=self._run, name="drafter-engine", daemon=True)

    def start(self) -> None:
        """Begins to take work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the work that is in the inbox; blocks until then."""
        self.inbox.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        crashed = True
        try:
            while batch := self.inbox.take():
                replies = self._engine.run(batch, self.inbox.supersedes)
                self._deliver(replies)
                self._engine.catch_up()
                self._record(replies)
            crashed = False
        except RankLost as error:
            log.critical(error.message)
        finally:
            if crashed:  # any other exception is on its way to threading.excepthook, which logs it
                self._died()

    def _record(self, replies: list[Reply]) -> None:
        if not self._telemetry.counts:
            return
        for reply in replies:
            if isinstance(reply, Evicted):
                self._telemetry.record(M.EVICTIONS, len(reply.session_ids))
            elif isinstance(reply, StepReply):
                self._telemetry.record(M.DRAFT_STEP, reply.queue_s, part="queue")
        steps = [reply for reply in replies if isinstance(reply, StepReply)]
        if steps:  # one batch, whose times all its steps share
            self._telemetry.record(M.DRAFT_STEP, steps[0].ingest_s, part="ingest")
            self._telemetry.record(M.DRAFT_STEP, steps[0].draft_s, part="draft")
        for reason, count in self._engine.take_counts().items():
            self._telemetry.record(M.UNDRAFTED, count, reason=reason)
        self._telemetry.record(M.SESSIONS, self._engine.num_sessions)
