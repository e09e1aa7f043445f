"""Continuous batching: who runs in the next step, with room for how many drafts, and the outcome.

Pure: knows neither torch nor grpc. `plan` chooses and takes KV blocks; `commit` appends what was
verified, token by token, rolls blocks back and ends requests. Decoding requests go first, prefill
chunks fill the rest of the step. When blocks run out, drafts are dropped first; then the youngest
running request is preempted: its blocks go back and it computes its tokens again later.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verifier_svc.drafting import Drafts
from verifier_svc.events import Delta, Event, Finished
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import Entry, FinishReason, Outlook, Plan, Request, Verdict
from verifier_svc.stopping import StopCursor, TextDecoder


@dataclass(frozen=True)
class SchedulerLimits:
    """Server settings that shape a step."""

    max_running: int = 32  # requests that hold KV
    max_batch_tokens: int = 512  # rows of one target forward
    max_drafts: int = 0  # drafts per request and round; 0 = plain decoding

    def __post_init__(self) -> None:
        assert 1 <= self.max_running <= self.max_batch_tokens, self
        assert self.max_drafts >= 0, self


class Scheduler:
    """Owned by the engine thread. `release` tells the drafter that a session ended or restarts."""

    def __init__(
        self,
        kv_blocks: KVBlocks,
        limits: SchedulerLimits,
        decoder_for: Callable[[Request], TextDecoder],
        release: Callable[[Request], None],
    ) -> None:
        self.kv_blocks = kv_blocks
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self._decoder_for = decoder_for
        self._release = release
        self._cursors: dict[Request, StopCursor] = {}  # of every request that has not ended
        self._step_id = 0

    def holds(self, request: Request) -> bool:
        """The request was added and has not ended."""
        return request in self._cursors

    @property
    def has_work(self) -> bool:
        """The next plan will have entries."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queues an admitted request, which must fit into a KV cache that it has to itself."""
        capacity = self.kv_blocks.num_blocks * self.kv_blocks.kv_block_size
        assert request.max_len - 1 <= capacity, (request.max_len, capacity)
        self._cursors[request] = StopCursor(request, self._decoder_for(request))
        self.waiting.append(request)

    def plan(self) -> Plan:
        """The next step. Takes the KV blocks it needs and preempts where it must."""
        self._step_id += 1
        num_preemptions = self.num_preemptions
        planned = self._plan_decoding()
        spare_rows = self.limits.max_batch_tokens - sum(1 + e.max_drafts for e in planned.values())
        for request in [r for r in self.running if r not in planned and not r.decoding]:
            preempted = not request.block_table  # for one before it in this loop
            if spare_rows and not preempted and self._take_one(request, planned, False):
                spare_rows -= self._plan_prefill(request, spare_rows, planned)
        if self.num_preemptions == num_preemptions:
            self._start_waiting(spare_rows, planned)
        assert planned or not self.has_work, "a step without entries would repeat for ever"
        return Plan(self._step_id, tuple(planned.values()))

    def commit(self, plan: Plan, drafts: Drafts, verdicts: Mapping[int, Verdict]) -> list[Event]:
        """Applies a step. `verdicts` has one for every entry that samples, by index in the plan."""
        events: list[Event] = []
        for index, entry in enumerate(plan.entries):
            request = entry.request
            if not entry.samples:
                request.num_computed = entry.start + entry.num_tokens
                continue
            verdict = verdicts[index]
            is_round = request.decoding
            delta = self._push(request, verdict)
            if is_round:
                _count(entry, verdict, len(delta.token_ids), drafts)
            computed = entry.start + entry.num_tokens + verdict.num_accepted
            request.num_computed = min(computed, len(request.token_ids) - 1)
            events.append(delta)
            if request.finish_reason is None:
                self.kv_blocks.shrink(request, request.num_computed)
            else:
                events.append(self._end(request))
        return events

    def outlook(self, plan: Plan, verdicts: Mapping[int, Verdict]) -> list[Outlook]:
        """Where the drafted rounds of `plan` lead if these verdicts hold; changes nothing.

        Left out are requests that end or want no drafts in the round after this one.
        """
        found = []
        for index, entry in enumerate(plan.entries):
            request = entry.request
            if not entry.max_drafts:
                continue
            verdict = verdicts[index]
            num_known = len(request.token_ids) + len(verdict.token_ids)
            max_drafts = self._drafts_wanted(request, num_known)
            if max_drafts > 0 and not self._cursors[request].ends_by_id(verdict.token_ids):
                start = entry.start + entry.num_tokens + verdict.num_accepted
                found.append(Outlook(request, start, verdict.token_ids[-1], max_drafts))
        return found

    def abort(self, request: Request) -> Finished:
        """Ends a live request between steps and frees all that it holds."""
        request.finish_reason = FinishReason.ABORT
        return self._end(request)

    def _plan_decoding(self) -> dict[Request, Entry]:
        """Anchors first, for all; then drafts, from what is left of rows and blocks."""
        planned: dict[Request, Entry] = {}
        for request in [request for request in self.running if request.decoding]:
            preempted = not request.block_table  # for one before it in this loop
            if not preempted and self._take_one(request, planned, True):
                planned[request] = Entry(request, request.num_computed, 1, True, 0)
        if not self.limits.max_drafts or not planned:
            return planned
        share = (self.limits.max_batch_tokens - len(planned)) // len(planned)
        for request, entry in planned.items():
            num_drafts = min(share, self._drafts_wanted(request, len(request.token_ids)))
            num_drafts = min(num_drafts, self.kv_blocks.room(request) - entry.start - 1)
            if num_drafts > 0:
                self.kv_blocks.grow(request, entry.start + 1 + num_drafts)
                planned[request] = Entry(request, entry.start, 1, True, num_drafts)
        return planned

    def _drafts_wanted(self, request: Request, num_known: int) -> int:
        """The last token that may be emitted needs no draft: it comes as the round's bonus."""
        wishes = request.speculation
        if not wishes.enabled:
            return 0
        most = min(self.limits.max_drafts, request.max_len - num_known - 1)
        return most if wishes.max_draft_tokens is None else min(most, wishes.max_draft_tokens)

    def _plan_prefill(self, request: Request, rows: int, planned: dict[Request, Entry]) -> int:
        """Plans a chunk of at most `rows` rows that fits the free blocks; returns its length."""
        start = request.num_computed
        room = self.kv_blocks.room(request) - start
        num_tokens = min(request.num_uncomputed, rows, room)
        self.kv_blocks.grow(request, start + num_tokens)
        samples = num_tokens == request.num_uncomputed
        planned[request] = Entry(request, start, num_tokens, samples, 0)
        return num_tokens

    def _start_waiting(self, rows: int, planned: dict[Request, Entry]) -> None:
        """First come, first served, once the blocks for all known tokens are there."""
        reserved = sum(self._missing_blocks(request) for request in self.running)
        while self.waiting and rows and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            missing = self._missing_blocks(request)
            if reserved + missing > self.kv_blocks.num_free:
                return
            self.running.append(self.waiting.popleft())
            request.times.scheduled = request.times.scheduled or time.monotonic()
            rows -= self._plan_prefill(request, rows, planned)
            reserved += self._missing_blocks(request)

    def _missing_blocks(self, request: Request) -> int:
        needed = self.kv_blocks.blocks_for(len(request.token_ids))
        return max(0, needed - len(request.block_table))

    def _take_one(self, request: Request, planned: Mapping[Request, Entry], yields: bool) -> bool:
        """A block for one more position, preempting the youngest request that has no entry yet.

        False if that is `request` itself; it then gives up its own blocks if it `yields`.
        """
        while not self.kv_blocks.grow(request, request.num_computed + 1):
            youngest = next(other for other in reversed(self.running) if other not in planned)
            if youngest is not request or yields:
                self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self.kv_blocks.shrink(request, 0)
        request.num_computed = 0
        self._release(request)
        self.waiting.appendleft(request)

    def _push(self, request: Request, verdict: Verdict) -> Delta:
        """Appends the verdict's tokens one by one until one of them ends the request."""
        cursor = self._cursors[request]
        text, text_ends = "", []
        for token_id in verdict.token_ids:
            text += cursor.push(token_id)
            text_ends.append(len(text))
            if request.finish_reason is not None:
                break
        num_tokens = len(text_ends)
        request.times.first_token = request.times.first_token or time.monotonic()
        return Delta(
            request.request_id,
            verdict.token_ids[:num_tokens],
            text,
            tuple(text_ends),
            min(verdict.num_accepted, num_tokens),
            verdict.logprobs[:num_tokens],
        )

    def _end(self, request: Request) -> Finished:
        text = self._cursors[request].flush()
        self._free(request)
        request.times.finished = time.monotonic()
        reason = request.finish_reason
        assert reason is not None, request.request_id
        by_id = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        return Finished(
            request.request_id,
            reason,
            request.matched_stop,
            request.token_ids[-1] if by_id else 0,
            request.num_prompt,
            request.num_output,
            request.sampling.seed,
            text,
            request.counters,
            request.times,
        )

    def _free(self, request: Request) -> None:
        del self._cursors[request]
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv_blocks.shrink(request, 0)
        self._release(request)


def _count(entry: Entry, verdict: Verdict, num_emitted: int, drafts: Drafts) -> None:
    """One decode round. A request that ended inside its drafts only counts those up to the end."""
    counters = entry.request.counters
    counters.num_rounds += 1
    if entry.max_drafts and drafts.of(entry.request) is None:
        counters.num_fallback_rounds += 1
    num_accepted = min(verdict.num_accepted, num_emitted)
    ended_inside = num_emitted <= verdict.num_accepted
    num_drafts = num_emitted if ended_inside else verdict.num_drafts
    if not num_drafts:
        return
    counters.num_drafted_rounds += 1
    counters.num_draft_tokens += num_drafts
    counters.num_accepted_tokens += num_accepted
    by_position = counters.accepted_by_position
    by_position.extend([0] * (num_accepted - len(by_position)))
    for position in range(num_accepted):
        by_position[position] += 1
