"""What the drafter holds of every request, and what the next step must tell it.

Pure: knows neither torch, grpc nor the clock (callers pass `now`). Engine thread only. One
mechanism serves prompts, accepted rows, late starts and re-attaching after a restart: send the
feature rows [synced, anchor), so many per step at most, and ask for drafts once they are complete.
A drafter whose blocks attend to a window only gets no row that no block will look at: rows begin
that much before the first anchor, and whoever falls behind by more begins anew.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from verifier_svc.request import Entry, Outlook, Plan, Request

FIRST_RETRY_S = 0.25  # after a session was refused for want of room
LONGEST_RETRY_S = 8.0


@dataclass(frozen=True)
class LinkLimits:
    """What this stream's drafter allows (drafter.proto `Welcome`)."""

    max_sessions: int
    max_step_rows: int
    max_context_len: int  # tokens of one session, the block included


@dataclass(frozen=True)
class Ask:
    """One entry of a step: rows [base_len, base_len + num_rows), then drafts if wanted."""

    request: Request
    epoch: int
    first_len: int  # where the epoch's rows begin
    base_len: int
    num_rows: int
    num_drafts: int = 0  # 0: rows only
    anchor_id: int = 0  # of no meaning without drafts

    @property
    def anchor_position(self) -> int:
        """Where the anchor is, once the rows are in."""
        return self.base_len + self.num_rows

    def answers(self, other: "Ask") -> bool:
        """The drafts of this ask are those of `other`, or begin with them."""
        return (
            self.num_drafts >= other.num_drafts > 0
            and (self.epoch, self.anchor_position, self.anchor_id)
            == (other.epoch, other.anchor_position, other.anchor_id)
            and self.request is other.request
        )


@dataclass
class _Session:
    epoch: int
    first: int  # position of the epoch's first row
    # Position up to which the drafter holds rows on this stream in this epoch: what was sent, less
    # what a guess had it drop, which goes again if the guess was wrong.
    synced: int
    decided: int  # of them, those below are of decided tokens; the others were sent ahead
    open: bool = False  # the drafter may hold something of it
    num_refusals: int = 0  # since the last draft
    retry_at: float = 0.0  # seconds on the caller's clock


class DraftSync:
    """State of all sessions on the current stream; a new stream starts from nothing."""

    def __init__(self, block_size: int, context_window: int = 0) -> None:
        """context_window: newest rows that a block attends to; 0: all."""
        self._block_size, self._context_window = block_size, context_window
        self._sessions: dict[int, _Session] = {}
        self._closing: list[int] = []
        # Never reused, so that nothing said about an earlier life of a session can be mistaken.
        self._epochs = itertools.count(1)
        self._limits = LinkLimits(0, 0, 0)

    @property
    def num_open(self) -> int:
        """Sessions that the drafter may hold."""
        return sum(session.open for session in self._sessions.values())

    def new_link(self, limits: LinkLimits) -> None:
        """A stream was welcomed: its drafter holds no session of ours."""
        self._limits = limits
        self._sessions.clear()
        self._closing.clear()

    def take_closing(self) -> list[int]:
        """Session ids to close, once."""
        closing, self._closing = self._closing, []
        return closing

    def settle(self, plan: Plan) -> None:
        """The step before `plan` is decided: of what was sent ahead in it, the right rows stay.

        In every step, even if nothing is sent in it: one step later nobody knows any more which
        rows were those of rejected drafts.
        """
        for entry in plan.entries:
            session = self._sessions.get(entry.request.session_id)
            if session is not None and session.decided <= entry.start:
                session.synced = session.decided = min(session.synced, entry.start)

    def asks(self, plan: Plan, now: float) -> list[Ask]:
        """What to send for `plan`; the rows count as synced from here on.

        Decoding requests come first, so that prompts never delay their rows.
        """
        asks, room = [], self._limits.max_step_rows
        num_open = self.num_open
        for entry in sorted(plan.entries, key=lambda entry: not entry.request.decoding):
            if not self._may_draft(entry):
                continue
            first = self._first_row(entry)
            if first > entry.start:  # of a prompt, nothing computed so far will be looked at
                continue
            session = self._session(entry, first)
            if now < session.retry_at or (
                not session.open and num_open >= self._limits.max_sessions
            ):
                continue
            num_rows = min(entry.start - session.synced, room)
            complete = session.synced + num_rows == entry.start
            num_drafts = min(entry.max_drafts, self._block_size) if complete else 0
            if num_rows or num_drafts:
                place = (session.epoch, session.first, session.synced)
                anchor_id = entry.request.token_ids[entry.start] if num_drafts else 0
                asks.append(Ask(entry.request, *place, num_rows, num_drafts, anchor_id))
                num_open += not session.open
                session.open = True
                session.synced += num_rows
                session.decided = session.synced
                room -= num_rows
        return asks

    def asks_ahead(self, outlooks: Iterable[Outlook]) -> list[Ask]:
        """What to send now for requests that will probably stand so after the step in progress.

        An ask that begins below what was sent has the drafter drop the rows from there on: those
        of drafts that a guess rejects, and after `settle` those that came otherwise.
        """
        asks, room = [], self._limits.max_step_rows
        for outlook in outlooks:
            session = self._sessions.get(outlook.request.session_id)
            if session is None or not session.open:
                continue
            base = min(session.synced, outlook.start)
            num_rows = outlook.start - base
            fits = outlook.start + self._block_size <= self._limits.max_context_len
            if not fits or num_rows > room or not (num_rows or outlook.max_drafts):
                continue
            asks.append(
                Ask(
                    outlook.request,
                    session.epoch,
                    session.first,
                    base,
                    num_rows,
                    min(outlook.max_drafts, self._block_size),
                    outlook.anchor_id or 0,
                )
            )
            session.synced = outlook.start
            room -= num_rows
        return asks

    def _may_draft(self, entry: Entry) -> bool:
        """Drafts are or will be of use; a request that outgrows the drafter is released."""
        request = entry.request
        wishes = request.speculation
        if not wishes.enabled or wishes.max_draft_tokens == 0:
            return False
        if request.decoding and not entry.max_drafts:
            return False
        if entry.start + self._block_size > self._limits.max_context_len:
            self.release(request.session_id)
            return False
        return True

    def _first_row(self, entry: Entry) -> int:
        """Position of the first row that the drafter needs for the next anchor and all later."""
        request = entry.request
        anchor_position = entry.start
        if not request.decoding:  # computed again in chunks, it may come to decode one token early
            anchor_position = len(request.token_ids) - (request.num_output > 0)
        return max(0, anchor_position - self._context_window) if self._context_window else 0

    def _session(self, entry: Entry, first: int) -> _Session:
        session = self._sessions.get(entry.request.session_id)
        if session is None:
            session = _Session(next(self._epochs), first, first, first)
            self._sessions[entry.request.session_id] = session
        elif not first <= session.synced <= entry.start:
            # Recomputed from an earlier position, or rows in between will never be sent.
            session.epoch = next(self._epochs)
            session.first = session.synced = session.decided = first
        return session

    def drafted(self, session_id: int) -> None:
        """A good draft came: whatever was refused before is forgiven."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.num_refusals = 0

    def restart(self, session_id: int, epoch: int, now: float, *, wait: bool) -> None:
        """The drafter holds this session no more: send it from its first row again.

        wait: for want of room or for a fault, so not at once. A session that keeps being refused
        waits in any case, twice as long each time.
        """
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch:
            return  # said of an earlier life
        num_waits = session.num_refusals if wait else session.num_refusals - 1
        delay = FIRST_RETRY_S * 2.0 ** min(num_waits, 16) if num_waits >= 0 else 0.0
        session.epoch, session.open = next(self._epochs), False
        session.synced = session.decided = session.first
        session.num_refusals += 1
        session.retry_at = now + min(delay, LONGEST_RETRY_S)

    def evicted(self, session_ids: Iterable[int], now: float) -> None:
        """The drafter made room: these wait a little before they start again."""
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            if session is not None:
                self.restart(session_id, session.epoch, now, wait=True)

    def release(self, session_id: int) -> None:
        """The request ended or was preempted; the next step closes its session."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.open:
            self._closing.append(session_id)
