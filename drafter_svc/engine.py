"""The drafter's compute: feature rows to context KV, and one block for every session that asks.

Synchronous; knows no thread, stream or wire type (`engine_thread.py` runs it over the inbox).
Invariant, asserted before every block: context length == position of the anchor. A block's own keys
and values go to scratch slots behind the context and are overwritten by the next rows. A bad entry
hurts only its own session.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.models.interfaces import DraftModel, KVCache
from common.tensors import from_bytes
from drafter_svc.batcher import (
    DraftMode,
    Entry,
    LinkClosed,
    LinkOpened,
    Ping,
    RowForm,
    Step,
    Work,
    newest_entries,
)
from drafter_svc.draft_sampling import MAX_TOP_K, BlockSampler
from drafter_svc.sessions import Refusal, Session, SessionTable, Status


@dataclass(frozen=True)
class Proposal:
    """What goes back for one entry; arrays are None where nothing is sent."""

    entry: Entry
    status: Status = Status.OK
    detail: str = ""
    token_ids: NDArray[np.int32] | None = None  # [num_drafts], target ids
    confidence_logits: NDArray[np.float32] | None = None  # [num_drafts]
    candidate_ids: NDArray[np.int32] | None = None  # [num_drafts, top_k]
    candidate_probs: NDArray[np.float32] | None = None  # [num_drafts, top_k]


@dataclass
class StepReply:
    """Exactly one per step, be it empty. Times are the whole batch's."""

    link: int
    step_id: int
    proposals: list[Proposal] = field(default_factory=list)
    queue_s: float = 0.0  # receipt to compute start
    ingest_s: float = 0.0
    draft_s: float = 0.0
    quiet: bool = False  # not worth a message without proposals


@dataclass(frozen=True)
class Pong:
    """Everything that the link sent before its ping has been answered."""

    link: int
    nonce: int
    num_sessions: int


@dataclass(frozen=True)
class Evicted:
    """Sessions of one link that had to make room."""

    link: int
    session_ids: tuple[int, ...]


Reply = StepReply | Pong | Evicted


# Whether newer work has come for every one of these (link, session id): nobody wants their drafts.
Superseded = Callable[[Iterable[tuple[int, int]]], bool]


@dataclass(frozen=True)
class _Span:
    """Feature rows that a session admitted at positions [start, start + num rows)."""

    session: Session
    start: int
    rows: Tensor  # [num rows, width] in the wire dtype
    form: RowForm


def _without_overlaps(spans: list[_Span]) -> list[_Span]:
    """Drops rows that their session was cut back behind later in the batch: one row per slot."""
    kept, ends = list[_Span](), dict[Session, int]()
    for span in reversed(spans):
        end = ends.get(span.session, span.start + len(span.rows))
        ends[span.session] = min(end, span.start)
        kept.append(replace(span, rows=span.rows[: max(0, end - span.start)]))
    return kept[::-1]


@dataclass(frozen=True)
class _Wish:
    """A session that drafts in this batch."""

    session: Session
    entry: Entry
    reply: StepReply


class DraftEngine:
    """One batch of work at a time: `run` answers it, `catch_up` then does what could wait."""

    def __init__(self, model: DraftModel, sessions: SessionTable, kv: KVCache) -> None:
        self._model, self._sessions, self._kv = model, sessions, kv
        self._waiting: list[_Span] = []  # admitted rows of sessions that do not draft now
        self._counts: Counter[str] = Counter()

    @property
    def num_sessions(self) -> int:
        """Sessions held now, of all verifiers."""
        return self._sessions.num_sessions

    def take_counts(self) -> Counter[str]:
        """Entries since the last call that got no draft, by reason: "stale" or "superseded"."""
        counts, self._counts = self._counts, Counter()
        return counts

    @torch.inference_mode()
    def run(self, batch: Sequence[Work], superseded: Superseded = lambda _: False) -> list[Reply]:
        """Applies the batch in order and drafts for the newest anchor of every session that asks.

        Rows of sessions that do not draft are admitted but not computed: call `catch_up` before the
        next `run`, after the replies are on their way. `superseded` is asked once, halfway through
        the drafts: if it says so, none of them is finished.
        """
        assert not self._waiting, (
            f"{len(self._waiting)} spans of the last batch were never caught up"
        )
        started = time.monotonic()
        newest, replies = newest_entries(batch), list[Reply]()
        spans, wishes = list[_Span](), list[_Wish]()
        for work in batch:
            match work:
                case Step():
                    queue_s = started - work.received
                    reply = StepReply(work.link, work.step_id, queue_s=queue_s, quiet=work.quiet)
                    self._admit(work, reply, newest, started, spans, wishes)
                    replies.append(reply)
                case Ping(link, nonce):
                    replies.append(Pong(link, nonce, self._sessions.num_sessions))
                case LinkOpened(link):
                    self._sessions.open_link(link)
                case LinkClosed(link):
                    self._sessions.close_link(link)
        spans = _without_overlaps(spans)
        drafting = {wish.session for wish in wishes}
        self._ingest(span for span in spans if span.session in drafting)
        self._waiting = [span for span in spans if span.session not in drafting]
        ingested = time.monotonic()
        if wishes:
            self._draft(wishes, superseded)
        finished = time.monotonic()
        for answer in replies:
            if isinstance(answer, StepReply):
                answer.ingest_s, answer.draft_s = ingested - started, finished - ingested
        return [*self._notices(), *replies]

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Ingests what `run` left: rows of prompts and rows ahead, whose asks come later."""
        waiting, self._waiting = self._waiting, []
        self._ingest(waiting)

    def _notices(self) -> list[Reply]:
        gone: dict[int, list[int]] = {}
        for link, session_id in self._sessions.take_evicted():
            gone.setdefault(link, []).append(session_id)
        return [Evicted(link, tuple(ids)) for link, ids in gone.items()]

    def _admit(
        self,
        step: Step,
        reply: StepReply,
        newest: dict[tuple[int, int], Entry],
        now: float,
        spans: list[_Span],
        wishes: list[_Wish],
    ) -> None:
        """Applies closes and entries to the sessions; collects rows to ingest and asks to draft."""
        for session_id in step.close_ids:
            self._sessions.close(step.link, session_id)
        num_rows = sum(entry.num_rows for entry in step.entries)
        rows = from_bytes(step.rows, step.form.dtype, (num_rows, step.form.width))
        # One number tells; a sum that overflows is looked at more closely.
        all_finite, offset = math.isfinite(float(rows.sum(dtype=torch.float32))), 0
        for entry in step.entries:
            own = rows.narrow(0, offset, entry.num_rows)
            offset += entry.num_rows
            fault = self._fault(entry)
            if fault is None and not all_finite and not own.isfinite().all():
                fault = f"rows {entry.base_len}..{entry.anchor_position - 1} hold NaN or infinity"
            if fault is not None:
                self._sessions.close(step.link, entry.session_id)
                reply.proposals.append(Proposal(entry, Status.INVALID, fault))
                continue
            session = self._sessions.extend(
                step.link,
                entry.session_id,
                entry.epoch,
                entry.base_len,
                entry.num_rows,
                now,
                entry.first_len,
            )
            if isinstance(session, Refusal):
                if session.status is Status.STALE:
                    self._counts["stale"] += 1
                else:
                    reply.proposals.append(Proposal(entry, session.status, session.detail))
                continue
            spans.append(_Span(session, entry.base_len, own, step.form))
            if entry.num_drafts and newest.get((step.link, entry.session_id)) is entry:
                wishes.append(_Wish(session, entry, reply))
            elif entry.num_drafts:
                self._counts["superseded"] += 1

    def _fault(self, entry: Entry) -> str | None:
        """What is wrong with the entry's own values, naming the value and what is allowed."""
        config, sampling = self._model.config, entry.sampling
        first_needed = max(0, entry.anchor_position - config.context_window)
        if entry.first_len and not config.context_window:
            return f"first_len {entry.first_len}: this drafter needs all rows from position 0 on"
        if entry.first_len > entry.base_len:
            return f"base_len {entry.base_len}: the rows begin at first_len, {entry.first_len}"
        if entry.num_drafts and entry.first_len > first_needed:
            return (
                f"first_len {entry.first_len} leaves out rows that an anchor at "
                f"{entry.anchor_position} needs; a block sees {config.context_window} of them"
            )
        if entry.num_drafts > config.block_size:
            return f"num_draft_tokens {entry.num_drafts}: a block has {config.block_size}"
        if entry.num_drafts and not 0 <= entry.anchor_id < config.vocab_size:
            return f"anchor_id {entry.anchor_id} is outside 0..{config.vocab_size - 1}"
        if sampling.mode is not DraftMode.GREEDY:
            if not 0 < sampling.temperature < math.inf:
                return f"temperature {sampling.temperature} must be above 0 and finite"
            if sampling.top_k > MAX_TOP_K:
                return f"top_k {sampling.top_k} must be at most {MAX_TOP_K}"
        return None

    def _ingest(self, spans: Iterable[_Span]) -> None:
        """Context keys and values of all rows, one forward per wire form."""
        by_form: dict[RowForm, list[_Span]] = {}
        for span in map(self._kept, spans):
            if span.session.live and len(span.rows):  # a later entry may have ended the session
                by_form.setdefault(span.form, []).append(span)
        for form, group in by_form.items():
            rows = group[0].rows if len(group) == 1 else torch.cat([span.rows for span in group])
            rows = rows.to(self._model.device, self._model.dtype)
            context = rows if form.projected else self._model.project(rows)
            positions = np.concatenate(
                [np.arange(span.start, span.start + len(span.rows)) for span in group]
            )
            slots = np.concatenate([self._slots(span) for span in group])
            self._model.ingest(
                context,
                self._kv,
                torch.from_numpy(slots).to(self._model.device),
                torch.from_numpy(positions).to(self._model.device),
            )

    def _kept(self, span: _Span) -> _Span:
        """Without rows that fell out of the window since they were admitted."""
        first_kept = span.session.num_forgotten * self._kv.kv_block_size
        if span.start >= first_kept:
            return span
        return replace(span, start=first_kept, rows=span.rows[first_kept - span.start :])

    def _slots(self, span: _Span) -> NDArray[np.int64]:
        size, stop = self._kv.kv_block_size, span.start + len(span.rows)
        first = span.start // size
        blocks = np.array(span.session.block_table[first : -(-stop // size)], dtype=np.int64)
        positions = np.arange(span.start, stop)
        return blocks[positions // size - first] * size + positions % size

    def _draft(self, wishes: list[_Wish], superseded: Superseded) -> None:
        """One block for all: backbone, Markov steps left to right, confidences; into replies."""
        for wish in wishes:
            assert wish.session.live and wish.session.length == wish.entry.anchor_position, (
                f"{wish.session} cannot draft after position {wish.entry.anchor_position}"
            )
        model, device = self._model, self._model.device
        positions = [wish.entry.anchor_position for wish in wishes]
        anchors = torch.tensor([wish.entry.anchor_id for wish in wishes], device=device)
        num_drafts = max(wish.entry.num_drafts for wish in wishes)
        hidden, logits = model.block(
            anchors,
            torch.tensor(positions, device=device),
            num_drafts,
            self._kv,
            [wish.session.block_table for wish in wishes],
        )
        if superseded((wish.reply.link, wish.entry.session_id) for wish in wishes):
            self._counts["superseded"] += len(wishes)
            return
        samplings = [wish.entry.sampling for wish in wishes]
        sampler = BlockSampler(samplings, positions, num_drafts, model.to_target_ids, device)
        tokens, state = [anchors], model.start_state(len(wishes))
        for place in range(num_drafts):
            row = logits[:, place]
            bias, state = model.bias(tokens[-1], hidden[:, place], state)
            tokens.append(sampler.pick(row if bias is None else row + bias, place))
        token_ids = torch.stack(tokens[1:], 1).to("cpu", torch.int32).numpy()
        confidence = model.confidence(hidden.flatten(0, 1), torch.stack(tokens[:-1], 1).flatten())
        logits_out = None if confidence is None else confidence.view(len(wishes), -1).cpu().numpy()
        candidates = sampler.candidates()
        for i, wish in enumerate(wishes):
            wanted = wish.entry.num_drafts
            ids, probs = candidates.get(i, (None, None))
            wish.reply.proposals.append(
                Proposal(
                    wish.entry,
                    token_ids=token_ids[i, :wanted],
                    confidence_logits=None if logits_out is None else logits_out[i, :wanted],
                    candidate_ids=None if ids is None else ids[:wanted],
                    candidate_probs=None if probs is None else probs[:wanted],
                )
            )
