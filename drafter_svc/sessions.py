"""Which sessions are open, how long their contexts are, which KV blocks they own, who must go.

Pure: knows neither torch nor grpc nor the clock (callers pass `now`). Engine thread only.

A session is named by (link, session id): `link` is one verifier's stream. Any refusal but STALE
means that the session is not held any more, so that one answer fits them all: restart it.

A session may be cut back a little: its newest rows may have come before their tokens were decided.
Where blocks of drafts attend to a window only, rows may begin later than position 0, and blocks of
rows that no window will reach any more, not even after a cut, are given back.
"""

import enum
from collections import OrderedDict
from dataclasses import dataclass, field


class Status(enum.Enum):
    """What became of one entry; all but STALE travel back (drafter.proto `Proposal.Status`)."""

    OK = "ok"
    UNKNOWN_SESSION = "unknown_session"
    BASE_MISMATCH = "base_mismatch"
    NO_ROOM = "no_room"
    INVALID = "invalid"
    STALE = "stale"  # belongs to an earlier epoch: dropped and counted


NO_BLOCK = -1  # place of a block table whose rows are not held any more, or never were


@dataclass(frozen=True)
class Refusal:
    """Why an entry was not taken."""

    status: Status
    detail: str


@dataclass(frozen=True)
class Limits:
    """Capacity, fixed at start."""

    num_blocks: int  # KV blocks shared by all sessions
    kv_block_size: int  # tokens per KV block
    block_size: int  # scratch rows behind every context: the drafter's B
    max_sessions: int  # of all verifiers together
    max_sessions_per_link: int
    max_context_len: int  # tokens one session may hold, scratch included
    context_window: int = 0  # newest rows that drafting looks at; 0: all
    evict_idle_s: float = 1.0  # a session unused for so long makes room for others


@dataclass(eq=False)
class Session:
    """One request's context: rows of positions [first_len, length); the next anchor's is length.

    Of the block table's places, the first `num_forgotten` have no block. After a cut it may be
    longer than needed: the rows that replace what was cut will need the blocks again.
    """

    link: int
    session_id: int
    epoch: int
    first_len: int = 0
    length: int = 0
    num_forgotten: int = 0
    block_table: list[int] = field(default_factory=list)
    last_used: float = 0.0  # caller's clock, seconds
    live: bool = True  # False once its blocks went back

    @property
    def blocks(self) -> list[int]:
        """The blocks that it owns."""
        return self.block_table[self.num_forgotten :]


class SessionTable:
    """All sessions of all verifiers over one pool of KV blocks.

    Room is made by evicting, least recently used first, sessions that are idle, or that belong to a
    link holding more than its equal share of blocks while the asking link is within its own.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._free = list(range(limits.num_blocks - 1, -1, -1))
        self._sessions: OrderedDict[tuple[int, int], Session] = OrderedDict()  # oldest use first
        self._blocks_of: dict[int, int] = {}  # every open link -> KV blocks held
        self._sessions_of: dict[int, int] = {}  # every open link -> sessions held
        self._evicted: list[tuple[int, int]] = []

    @property
    def num_sessions(self) -> int:
        """Sessions held now."""
        return len(self._sessions)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that nobody owns."""
        return len(self._free)

    def open_link(self, link: int) -> None:
        """A verifier joined: the equal share of blocks shrinks."""
        self._blocks_of[link] = self._sessions_of[link] = 0

    def close_link(self, link: int) -> None:
        """A verifier left: all of its sessions go, without notice."""
        for session in [s for s in self._sessions.values() if s.link == link]:
            self._drop(session)
        del self._blocks_of[link], self._sessions_of[link]

    def close(self, link: int, session_id: int) -> None:
        """The request ended; closing what is not open is fine (it may have been evicted)."""
        session = self._sessions.get((link, session_id))
        if session is not None:
            self._drop(session)

    def take_evicted(self) -> list[tuple[int, int]]:
        """(link, session id) of every session evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def extend(
        self,
        link: int,
        session_id: int,
        epoch: int,
        base_len: int,
        num_rows: int,
        now: float,
        first_len: int = 0,
    ) -> Session | Refusal:
        """Makes room for rows [base_len, base_len + num_rows) and the scratch block behind them.

        `base_len` equal to `first_len` with a new epoch starts the session; below the length of one
        that runs, it cuts it back first, by `block_size` rows at most. On success the rows count as
        held: the caller writes them before it drafts from the session.
        """
        assert link in self._blocks_of, f"link {link} was never opened"
        assert first_len <= base_len, f"rows from {base_len} on begin before {first_len}"
        session = self._sessions.get((link, session_id))
        if session is not None and epoch < session.epoch:
            return Refusal(Status.STALE, f"epoch {epoch} is over, {session.epoch} runs")
        if session is not None and epoch > session.epoch:
            self._drop(session)
            session = None
        if session is None:
            if base_len > first_len:
                detail = f"{base_len - first_len} rows of epoch {epoch} are not held here"
                return Refusal(Status.UNKNOWN_SESSION, detail)
            session = Session(link, session_id, epoch, first_len, first_len)
        elif mismatch := self._mismatch(session, base_len, first_len):
            self._drop(session)
            return Refusal(Status.BASE_MISMATCH, mismatch)
        session.length = base_len
        refusal = self._grow(session, num_rows, now)
        if refusal is not None:
            self.close(link, session_id)
            return refusal
        return session

    def _mismatch(self, session: Session, base_len: int, first_len: int) -> str | None:
        """Why rows from `base_len` on cannot follow what `session` holds, if so."""
        first_held = max(session.first_len, session.num_forgotten * self.limits.kv_block_size)
        lowest = max(session.first_len, session.length - self.limits.block_size)
        if first_held > session.first_len:  # rows went back: an anchor's window must be whole
            lowest = max(lowest, first_held + self.limits.context_window)
        if first_len == session.first_len and lowest <= base_len <= session.length:
            return None
        return (
            f"rows {first_held}..{session.length} are held; base_len is {base_len}, {lowest}.."
            f"{session.length} fit; first_len is {first_len}, this epoch's is {session.first_len}"
        )

    def _grow(self, session: Session, num_rows: int, now: float) -> Refusal | None:
        """Gives `session` its blocks and enters it into the table, or says why not."""
        limits, key = self.limits, (session.link, session.session_id)
        total = session.length + num_rows + limits.block_size
        if total > limits.max_context_len:
            return Refusal(
                Status.NO_ROOM,
                f"{total} tokens, one session holds at most {limits.max_context_len}",
            )
        if limits.context_window:
            # What the window of the farthest cut from here will look at stays.
            farthest = session.length - limits.block_size - limits.context_window
            self._forget(session, max(session.first_len, farthest))
        opening = key not in self._sessions
        if opening and self._sessions_of[session.link] >= limits.max_sessions_per_link:
            detail = f"a verifier may hold at most {limits.max_sessions_per_link} sessions"
            return Refusal(Status.NO_ROOM, detail)
        num_blocks = max(0, -(-total // limits.kv_block_size) - len(session.block_table))
        if not self._make_room(session, num_blocks, opening, now):
            detail = (
                f"{num_blocks} KV blocks wanted, {len(self._free)} free; "
                f"{len(self._sessions)} of {limits.max_sessions} sessions open"
            )
            return Refusal(Status.NO_ROOM, detail)
        session.block_table += [self._free.pop() for _ in range(num_blocks)]
        self._blocks_of[session.link] += num_blocks
        if opening:
            self._sessions[key] = session
            self._sessions_of[session.link] += 1
        self._sessions.move_to_end(key)
        session.length += num_rows
        session.last_used = now
        return None

    def _make_room(self, asking: Session, num_blocks: int, opening: bool, now: float) -> bool:
        """Evicts until `asking` fits; evicts nobody when it would not fit even so."""
        room, slots = len(self._free), self.limits.max_sessions - len(self._sessions)
        if room >= num_blocks and slots >= opening:
            return True
        share = self.limits.num_blocks // len(self._blocks_of)
        within_share = self._blocks_of[asking.link] + num_blocks <= share
        held = dict(self._blocks_of)
        victims = []
        for other in self._sessions.values():
            if other is asking:
                continue
            idle = now - other.last_used >= self.limits.evict_idle_s
            yields = within_share and other.last_used < now and held[other.link] > share
            if idle or yields:
                victims.append(other)
                room, slots = room + len(other.blocks), slots + 1
                held[other.link] -= len(other.blocks)
                if room >= num_blocks and slots >= opening:
                    for victim in victims:
                        self._drop(victim)
                        self._evicted.append((victim.link, victim.session_id))
                    return True
        return False

    def _drop(self, session: Session) -> None:
        del self._sessions[session.link, session.session_id]
        session.live = False
        self._give_back(session, session.blocks)
        self._sessions_of[session.link] -= 1

    def _forget(self, session: Session, first_len: int) -> None:
        """Nothing before position `first_len` will be looked at: its whole blocks go back."""
        keep = first_len // self.limits.kv_block_size
        table, start = session.block_table, session.num_forgotten
        if keep <= start:
            return
        self._give_back(session, table[start:keep])
        table[start:keep] = [NO_BLOCK] * (keep - start)
        session.num_forgotten = keep

    def _give_back(self, session: Session, blocks: list[int]) -> None:
        self._free += reversed(blocks)  # so that the next owner gets a run
        self._blocks_of[session.link] -= len(blocks)
