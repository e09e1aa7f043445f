"""What verifiers ask for, the inbox it waits in, and which asks of one batch still matter.

Pure: knows neither torch nor grpc. The loop thread puts, the engine thread takes; everything that
piled up while the engine computed is one batch, of all verifiers together.
"""

import enum
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field


class DraftMode(enum.Enum):
    """How the tokens of a block are chosen (drafter.proto `DraftSampling.Mode`)."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    COUPLED = "coupled"


@dataclass(frozen=True)
class Sampling:
    """A session's wish; the defaults are greedy."""

    mode: DraftMode = DraftMode.GREEDY
    temperature: float = 1.0  # > 0 unless greedy
    seed: int = 0  # uint64
    top_k: int = 0  # candidates kept unless greedy; 0 = the drafter's default


GREEDY = Sampling()


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One session's share of a step; fields as in drafter.proto `Entry`."""

    session_id: int
    epoch: int
    base_len: int
    num_rows: int
    num_drafts: int
    anchor_id: int
    sampling: Sampling = GREEDY
    first_len: int = 0

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor: the context length that drafting needs."""
        return self.base_len + self.num_rows


@dataclass(frozen=True)
class RowForm:
    """How a verifier's feature rows look on the wire, agreed at Hello."""

    projected: bool  # through fc and hidden_norm already, else the taps as they are
    dtype: str  # "bf16" or "fp32"
    width: int  # values per row


@dataclass(frozen=True, eq=False)
class Step:
    """One Step message. `rows` has exactly the entries' rows, in entry order."""

    link: int
    step_id: int
    entries: tuple[Entry, ...]
    rows: bytes
    form: RowForm
    close_ids: tuple[int, ...] = ()  # applied before the entries
    quiet: bool = False  # answered only if there are drafts or failed entries
    received: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Ping:
    """Answered in turn, so that the answer proves the engine has caught up."""

    link: int
    nonce: int


@dataclass(frozen=True)
class LinkOpened:
    """A verifier's stream was welcomed."""

    link: int


@dataclass(frozen=True)
class LinkClosed:
    """A verifier's stream ended, whatever the cause."""

    link: int


Work = Step | Ping | LinkOpened | LinkClosed


class Inbox:
    """Work from the loop thread to the engine thread.

    Bounded by its users: a link may have only so many unanswered steps and pings in here.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._work: list[Work] = []
        self._closed = False

    def put(self, work: Work) -> None:
        """Wakes the engine; after `close` the work is dropped."""
        with self._ready:
            if not self._closed:
                self._work.append(work)
                self._ready.notify()

    def take(self) -> list[Work]:
        """Blocks until there is work and takes all of it in order; empty only after `close`."""
        with self._ready:
            self._ready.wait_for(lambda: self._work or self._closed)
            work, self._work = self._work, []
            return work

    def supersedes(self, asks: Iterable[tuple[int, int]]) -> bool:
        """Whether newer work waits here for every one of these (link, session id)."""
        with self._ready:
            waiting = list(self._work)
        left = {work.link for work in waiting if isinstance(work, LinkClosed)}
        newer = {
            (step.link, session_id)
            for step in waiting
            if isinstance(step, Step)
            for session_id in (*step.close_ids, *(entry.session_id for entry in step.entries))
        }
        return all(ask in newer or ask[0] in left for ask in asks)

    def close(self) -> None:
        """The engine ends once it has taken what is left."""
        with self._ready:
            self._closed = True
            self._ready.notify()


def newest_entries(batch: Iterable[Work]) -> dict[tuple[int, int], Entry]:
    """The last entry of every (link, session id) that is still open when the batch ends.

    Only these may draft: an earlier ask for the same session has been answered by the verifier's
    own step, or was a guess that came otherwise, so its draft would be thrown away on arrival.
    """
    newest: dict[tuple[int, int], Entry] = {}
    for work in batch:
        if isinstance(work, LinkClosed):
            newest = {key: entry for key, entry in newest.items() if key[0] != work.link}
        elif isinstance(work, Step):
            for session_id in work.close_ids:
                newest.pop((work.link, session_id), None)
            for entry in work.entries:
                newest[work.link, entry.session_id] = entry
    return newest
