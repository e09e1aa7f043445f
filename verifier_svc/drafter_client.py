"""The Drafter promise kept over gRPC: Steps up, Proposals down, matched by step id.

Most of what the next step will ask is sent ahead, during the step before (`look_ahead`); `propose`
sends what came otherwise. These and `release` run on the engine thread and own all session state;
the stream itself lives on the loop thread (`draft_link.py`). Whatever the drafter does, a step
waits at most `draft_timeout_ms`, and bad or late answers only cost their drafts.
"""

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Sequence

from common.contract import Contract
from common.logs import fields
from common.pb.v1 import drafter_pb2 as pb
from common.telemetry import M, Telemetry
from verifier_svc.breaker import Breaker, BreakerState
from verifier_svc.draft_link import DraftConnector, DraftLink, LinkSettings
from verifier_svc.draft_payload import read_draft
from verifier_svc.draft_sync import Ask, DraftSync, LinkLimits
from verifier_svc.drafting import Draft, DrafterStatus, Drafts, FeatureSource
from verifier_svc.request import Outlook, Plan, Request, SamplingMode, SamplingParams

log = logging.getLogger(__name__)

# Step messages; below the drafter's own limit, past which it stops reading.
MAX_UNANSWERED = 12


Want = tuple[int, Ask]  # id of the Step that asked, and what its draft must answer


class DrafterClient:
    """A `Drafter` at the other end of a stream; `start` and `stop` are the loop thread's."""

    def __init__(
        self,
        settings: LinkSettings,
        contract: Contract,
        telemetry: Telemetry,
        on_change: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        """`on_change(ready)` is called on the loop thread whenever the draft path comes or goes."""
        self._settings, self._contract, self._telemetry = settings, contract, telemetry
        self._connector = DraftConnector(settings, contract, telemetry, on_change)
        self._breaker = Breaker(settings.breaker_after)
        self._sync = DraftSync(contract.block_size, contract.context_window)
        self._link: DraftLink | None = None  # the one that `_sync` speaks of
        self._unanswered: dict[int, list[Ask]] = {}  # step id -> what it asked
        self._wanted: dict[int, Want] = {}  # by session; other drafts do not count
        self._answers: dict[int, Drafts] = {}  # by step id, of what is wanted
        self._last_step_id = 0
        self._drafter_s = 0.0  # what the drafter says that its last answer took it
        self._complained = False  # of this link, in the log
        # Called by `propose` between sending and waiting: what else the engine thread has to do.
        self.meanwhile: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Connects in the background."""
        self._connector.start()

    async def stop(self) -> None:
        """Leaves politely; after this no task is left. The engine must have stopped before."""
        await self._connector.stop()

    def status(self) -> DrafterStatus:
        """For server info and health; loop thread."""
        address, connector = self._settings.address, self._connector
        link = connector.link
        if link is None or link.lost:
            state = "REFUSED" if connector.refused else "CONNECTING"
            return DrafterStatus(state, address, connector.reason)
        state = "READY" if link.answering else "SUSPENDED"
        return DrafterStatus(state, address, incarnation=link.welcome.incarnation)

    # The engine thread's, as `drafting.Drafter` has it.

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        """Sends what is new, then waits for drafts if any were asked for."""
        link = self._current_link()
        if link is None:
            return Drafts()
        self._sync.settle(plan)
        self._take_waiting(link)
        # A link lost just now: what would have ended the wait may have been read already.
        if link.lost or not self._breaker.allows or self._is_behind(link, plan):
            self._want({})
            return Drafts()
        ahead, asks, wanted = self._wanted, list[Ask](), dict[int, Want]()
        for ask in self._sync.asks(plan, time.monotonic()):
            early = ahead.get(ask.request.session_id)
            if early is not None and early[1].answers(ask):
                wanted[ask.request.session_id] = early[0], ask
            else:
                asks.append(ask)
        step_id = self._send(link, asks, features)
        wanted |= {ask.request.session_id: (step_id, ask) for ask in asks if ask.num_drafts}
        self._want(wanted)
        if wanted:
            self.meanwhile()
            self._wait(link)
        return self._take_drafts()

    @property
    def may_look_ahead(self) -> bool:
        """The drafter listens, and nothing is piling up."""
        link = self._connector.link
        return (
            self._settings.look_ahead
            and link is not None
            and link is self._link
            and not link.lost
            and self._breaker.allows
            and len(self._unanswered) < MAX_UNANSWERED // 2
        )

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        """Sends what will probably be asked next; `propose` finds out whether it was right."""
        link = self._link
        if link is None or not self.may_look_ahead:
            return
        if 2 * self._drafter_s > self._settings.draft_timeout_ms / 1e3:
            # A wrong guess and what corrects it must both fit into the wait.
            outlooks = [outlook for outlook in outlooks if outlook.anchor_id is None]
        asks = self._sync.asks_ahead(outlooks)
        quiet = not any(ask.num_drafts for ask in asks)
        step_id = self._send(link, asks, features, quiet=quiet)
        self._wanted |= {ask.request.session_id: (step_id, ask) for ask in asks if ask.num_drafts}

    def release(self, request: Request) -> None:
        """Closes the session now if the drafter listens, else with the next step."""
        self._sync.release(request.session_id)
        if self._wanted.pop(request.session_id, None) is not None:
            self._telemetry.record(M.ASKED_AHEAD, outcome="in_vain")
        link = self._current_link()
        if link is not None:
            self._take_waiting(link)
            if self._breaker.allows and len(self._unanswered) < MAX_UNANSWERED:
                self._send(link, [], None)

    def close(self) -> None:
        """Nothing to do here: `stop` on the loop thread ends the stream."""

    def _current_link(self) -> DraftLink | None:
        link = self._connector.link
        if link is None or link.lost:
            return None
        if link is not self._link:
            self._link = link
            welcome = link.welcome
            self._sync.new_link(
                LinkLimits(welcome.max_sessions, welcome.max_step_rows, welcome.max_context_len)
            )
            self._unanswered.clear()
            self._want({})
            self._complained = False
            self._breaker = Breaker(self._settings.breaker_after)
        return link

    def _send(
        self,
        link: DraftLink,
        asks: list[Ask],
        features: FeatureSource | None,
        *,
        quiet: bool = False,
    ) -> int:
        """One Step: rows of all asks, and what to close. Nothing to say sends nothing."""
        closing = self._sync.take_closing()
        if not asks and not closing:
            return 0
        self._last_step_id += 1
        message = pb.DraftRequest()
        step = message.step
        step.step_id, step.quiet = self._last_step_id, quiet or not asks
        step.close_ids.extend(closing)
        spans = []
        for ask in asks:
            step.entries.append(_ask_to_pb(ask, self._settings.top_k))
            if ask.num_rows:
                spans.append((ask.request, ask.base_len, ask.anchor_position))
        if spans and features is not None:
            rows = features.read(spans)
            step.rows = rows
            self._telemetry.record(M.FEATURE_BYTES, len(rows))
        if asks:  # else there is nothing to answer
            self._unanswered[step.step_id] = asks
        link.send(message)
        return self._last_step_id

    def _want(self, wanted: dict[int, Want]) -> None:
        """From now on only these drafts count; of answers that are there, theirs stay."""
        if self._telemetry.counts:
            before = self._wanted.items()
            used = sum(wanted.get(i, (0,))[0] == step_id for i, (step_id, _) in before)
            self._telemetry.record(M.ASKED_AHEAD, used, outcome="used")
            self._telemetry.record(M.ASKED_AHEAD, len(before) - used, outcome="in_vain")
        steps = {step_id for step_id, _ in wanted.values()}
        self._answers = {i: drafts for i, drafts in self._answers.items() if i in steps}
        self._wanted = wanted

    def _take_drafts(self) -> Drafts:
        """What is there of what is wanted; afterwards nothing is."""
        wanted, answers = self._wanted, self._answers
        self._wanted, self._answers = {}, {}
        drafts = {}
        for session_id, (step_id, ask) in wanted.items():
            answer = answers.get(step_id)
            draft = None if answer is None else answer.by_session.get(session_id)
            if draft is not None:
                drafts[session_id] = draft.truncated(ask.num_drafts)
        drafter_s = max((answer.drafter_s for answer in answers.values()), default=0.0)
        return Drafts(drafts, drafter_s)

    def _is_behind(self, link: DraftLink, plan: Plan) -> bool:
        """So much is unanswered that nothing more is sent."""
        behind = len(self._unanswered) >= MAX_UNANSWERED
        if behind and plan.wants_drafts:
            self._late(link, "backlog")
        return behind

    def _wait(self, link: DraftLink) -> None:
        """Until every step with drafts that count is answered, or the time is over."""
        left = self._settings.draft_timeout_ms / 1e3
        deadline = time.monotonic() + left
        steps = {step_id for step_id, _ in self._wanted.values()}
        while not steps.isdisjoint(self._unanswered):
            try:
                if left < 0:  # a flood must not stretch the wait
                    raise queue.Empty
                message = link.inbox.get(timeout=left)
            except queue.Empty:
                return self._late(link, "timeout")
            if message is None:
                return self._telemetry.record(M.DRAFT_LATE, reason="lost")
            self._apply(message)
            left = deadline - time.monotonic()
        return self._breaker.in_time()

    def _take_waiting(self, link: DraftLink) -> None:
        """Applies what came since the last step: late answers, evictions, a Pong."""
        for _ in range(link.inbox.qsize()):  # only this thread takes; a flood goes on for ever
            message = link.inbox.get_nowait()
            if message is not None:
                self._apply(message)

    def _late(self, link: DraftLink, reason: str) -> None:
        self._telemetry.record(M.DRAFT_LATE, reason=reason)
        probe_after = self._breaker.late()
        if probe_after is not None:
            link.probe(probe_after)

    def _apply(self, message: pb.DraftResponse) -> None:
        """Takes in one message."""
        kind = message.WhichOneof("kind")
        if kind == "proposals":
            self._proposals(message.proposals)
        elif kind == "evicted":
            self._sync.evicted(message.evicted.session_ids, time.monotonic())
        elif kind == "pong" and self._breaker.state is BreakerState.SUSPENDED:
            self._breaker.answered()

    def _proposals(self, proposals: pb.Proposals) -> None:
        asks = self._unanswered.get(proposals.step_id)
        if asks is None:
            self._bad(f"proposals for step {proposals.step_id}, which waits for none")
            return
        # Steps are answered in order, and quiet ones by the next one's answer.
        for step_id in [i for i in self._unanswered if i <= proposals.step_id]:
            del self._unanswered[step_id]
        asked = {ask.request.session_id: ask for ask in asks}
        spent_us = proposals.queue_us + proposals.ingest_us + proposals.draft_us
        self._drafter_s = spent_us / 1e6
        drafts = Drafts(drafter_s=self._drafter_s)
        for proposal in proposals.proposals:
            ask = asked.get(proposal.session_id)
            if (
                ask is None
                or proposal.epoch != ask.epoch
                or proposal.base_len != ask.anchor_position
            ):
                self._bad(
                    f"proposal for session {proposal.session_id}, epoch {proposal.epoch}, base "
                    f"{proposal.base_len}, which step {proposals.step_id} did not ask for"
                )
            elif proposal.status != pb.Proposal.STATUS_OK:
                self._refused(proposal)
            elif self._wanted.get(proposal.session_id, (0,))[0] != proposals.step_id:
                self._telemetry.record(M.STALE_PROPOSALS)  # its anchor was decided without it
            else:
                draft = self._draft(proposal, ask)
                if draft is not None:
                    drafts.by_session[proposal.session_id] = draft
        if any(step_id == proposals.step_id for step_id, _ in self._wanted.values()):
            self._answers[proposals.step_id] = drafts

    def _refused(self, proposal: pb.Proposal) -> None:
        lost = (pb.Proposal.STATUS_UNKNOWN_SESSION, pb.Proposal.STATUS_BASE_MISMATCH)
        wait = proposal.status not in lost
        if proposal.status == pb.Proposal.STATUS_INVALID:
            self._complain("the drafter refused what this verifier sent", proposal.detail)
        self._sync.restart(proposal.session_id, proposal.epoch, time.monotonic(), wait=wait)

    def _bad(self, reason: str) -> None:
        """Counts what broke the contract; the log hears of the first on every link."""
        self._telemetry.record(M.BAD_PROPOSALS)
        self._complain("the drafter broke its contract", reason)

    def _complain(self, what: str, reason: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning(f"{what}; that draft is dropped", extra=fields(reason=reason))

    def _draft(self, proposal: pb.Proposal, ask: Ask) -> Draft | None:
        """The checked draft; None, counted, for one that breaks the contract."""
        sampling = ask.request.sampling
        draft = read_draft(
            token_ids=proposal.token_ids,
            confidence_logits=proposal.confidence_logits,
            top_k=proposal.top_k,
            candidate_ids=proposal.candidate_ids,
            candidate_probs=proposal.candidate_probs,
            max_drafts=ask.num_drafts,
            vocab_size=self._contract.vocab_size,
            sampled=not sampling.greedy and sampling.mode is SamplingMode.REJECTION,
        )
        if isinstance(draft, str):
            self._bad(draft)
            return None
        self._sync.drafted(proposal.session_id)
        return draft


def _ask_to_pb(ask: Ask, top_k: int) -> pb.Entry:
    entry = pb.Entry(
        session_id=ask.request.session_id,
        epoch=ask.epoch,
        first_len=ask.first_len,
        base_len=ask.base_len,
        num_rows=ask.num_rows,
        num_draft_tokens=ask.num_drafts,
    )
    if ask.num_drafts:
        entry.anchor_id = ask.anchor_id
        sampling = ask.request.sampling
        if not sampling.greedy:
            entry.sampling.mode = _MODES[sampling.mode]
            entry.sampling.temperature = sampling.temperature
            entry.sampling.seed = _draft_seed(sampling)
            entry.sampling.top_k = top_k
    return entry


def _draft_seed(sampling: SamplingParams) -> int:
    """COUPLED shares the request's seed. REJECTION must not: a drafter that knew it could foresee
    the draws that accept its drafts, and bend the output towards them.
    """
    if sampling.mode is SamplingMode.COUPLED:
        return sampling.seed
    digest = hashlib.blake2b(sampling.seed.to_bytes(8, "little"), digest_size=8, person=b"draft")
    return int.from_bytes(digest.digest(), "little")


_MODES = {
    SamplingMode.REJECTION: pb.DraftSampling.MODE_SAMPLED,
    SamplingMode.COUPLED: pb.DraftSampling.MODE_COUPLED,
}
