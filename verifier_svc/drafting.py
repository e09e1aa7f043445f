"""The promise between engine and drafter: what a draft is, and who may give one.

Pure but for numpy arrays of a few kB. `drafter_client.py` keeps the promise over gRPC; `NoDrafter`
is plain decoding; tests plug in their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verifier_svc.request import Entry, Outlook, Plan, Request


@dataclass(frozen=True)
class Draft:
    """Proposed tokens after one request's anchor.

    The candidates are None for arg-max and coupled drafts, whose draft distribution is one-hot.
    Otherwise token k was sampled from exactly `candidate_probs[k]` over `candidate_ids[k]`.
    """

    token_ids: tuple[int, ...]
    confidence_logits: tuple[float, ...] = ()  # raw, before STS; empty without a confidence head
    candidate_ids: NDArray[np.int64] | None = None  # [num_drafts, top_k]
    candidate_probs: NDArray[np.float32] | None = None  # [num_drafts, top_k], rows sum to 1

    def truncated(self, num_drafts: int) -> "Draft":
        """The first `num_drafts` tokens of this draft."""
        return Draft(
            self.token_ids[:num_drafts],
            self.confidence_logits[:num_drafts],
            None if self.candidate_ids is None else self.candidate_ids[:num_drafts],
            None if self.candidate_probs is None else self.candidate_probs[:num_drafts],
        )


@dataclass
class Drafts:
    """All drafts of one step, keyed by session id, and where the wait went (seconds)."""

    by_session: dict[int, Draft] = field(default_factory=dict)
    drafter_s: float = 0.0  # drafter's own queue + ingest + draft time, as it says itself

    def of(self, request: Request) -> Draft | None:
        """The draft of `request`, if one came in time."""
        return self.by_session.get(request.session_id)

    def within(self, entry: Entry) -> Draft | None:
        """The draft that may go through the target with `entry`: None where there is no room."""
        return self.of(entry.request) if entry.max_drafts else None


@dataclass(frozen=True)
class DrafterStatus:
    """How the link to the drafter is doing, for GetInfo and the draft-path health."""

    state: str  # NONE, CONNECTING, READY, SUSPENDED or REFUSED, as in verifier.proto
    address: str = ""
    detail: str = ""
    incarnation: int = 0


class FeatureSource(Protocol):
    """Where a drafter gets feature rows: the runner's store, indexed by absolute position."""

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        """Rows of positions [start, stop) of each request, concatenated, in the wire dtype."""
        ...


class Drafter(Protocol):
    """Advisory: every method returns within a bounded time and never raises for a peer's fault."""

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        """Sends what is new since the last step, waits (bounded) for drafts of `plan`'s entries.

        Drafts may be missing for any entry and shorter than `max_drafts`, never longer.
        """
        ...

    @property
    def may_look_ahead(self) -> bool:
        """`look_ahead` is of use to it now."""
        ...

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        """Between two `propose`: what is known of some requests before the step has ended.

        May be called several times in a step; the newest guess about a request counts.
        """
        ...

    def release(self, request: Request) -> None:
        """The request ended or was preempted: its session may be dropped."""
        ...

    def close(self) -> None:
        """The engine stops."""
        ...


class NoDrafter:
    """Plain decoding."""

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        """No drafts, no wait."""
        return Drafts()

    @property
    def may_look_ahead(self) -> bool:
        """Never."""
        return False

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        """Nobody is told."""

    def release(self, request: Request) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is open."""
