"""The drafter's engine as a `Drafter` in the verifier's own process: what the split is measured
against.

The same sync state, steps, rows and checks as `DrafterClient`, without gRPC, threads and protobuf.
"""

import time
from collections.abc import Callable

from drafter_svc.batcher import GREEDY, DraftMode, Entry, LinkOpened, RowForm, Sampling, Step
from drafter_svc.engine import DraftEngine, StepReply
from verifier_svc.draft_payload import read_draft
from verifier_svc.draft_sync import Ask, DraftSync, LinkLimits
from verifier_svc.drafting import Draft, Drafts, FeatureSource, NoDrafter
from verifier_svc.request import Plan, Request, SamplingMode

MODES = {SamplingMode.REJECTION: DraftMode.SAMPLED, SamplingMode.COUPLED: DraftMode.COUPLED}


class InProcessDrafter(NoDrafter):
    """Runs the engine on the caller's thread."""

    def __init__(
        self,
        engine: DraftEngine,
        limits: LinkLimits,
        form: RowForm,
        block_size: int,
        vocab: int,
        context_window: int = 0,
    ) -> None:
        self._engine, self._form, self._vocab = engine, form, vocab
        self._sync, self._step_id = DraftSync(block_size, context_window), 0
        self._sync.new_link(limits)
        engine.run([LinkOpened(1)])

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        """As `drafting.Drafter`; waits for the engine, however long it takes."""
        asks = self._sync.asks(plan, time.monotonic())
        spans = [(ask.request, ask.base_len, ask.anchor_position) for ask in asks if ask.num_rows]
        return self._run(asks, features.read(spans) if spans else b"")

    def release(self, request: Request) -> None:
        """Closes the session."""
        self._sync.release(request.session_id)
        self._run([], b"")

    def close(self) -> None:
        """Nothing is open."""

    def _run(self, asks: list[Ask], rows: bytes) -> Drafts:
        self._step_id += 1
        closing = tuple(self._sync.take_closing())
        entries = tuple(map(_entry, asks))
        step = Step(1, self._step_id, entries, rows, self._form, closing)
        (reply,) = self._engine.run([step])
        self._engine.catch_up()
        assert isinstance(reply, StepReply)
        asked = {ask.request.session_id: ask for ask in asks}
        drafts = Drafts(drafter_s=reply.ingest_s + reply.draft_s)
        for proposal in reply.proposals:
            assert proposal.token_ids is not None, proposal.detail
            session_id = proposal.entry.session_id
            draft = read_draft(
                token_ids=proposal.token_ids.tobytes(),
                confidence_logits=_bytes(proposal.confidence_logits),
                top_k=0 if proposal.candidate_ids is None else proposal.candidate_ids.shape[1],
                candidate_ids=_bytes(proposal.candidate_ids),
                candidate_probs=_bytes(proposal.candidate_probs),
                max_drafts=asked[session_id].num_drafts,
                vocab_size=self._vocab,
                sampled=proposal.candidate_ids is not None,
            )
            assert isinstance(draft, Draft), draft
            drafts.by_session[session_id] = draft
        return drafts


def _bytes(array: object) -> bytes:
    tobytes: Callable[[], bytes] = getattr(array, "tobytes", bytes)
    return tobytes()


def _entry(ask: Ask) -> Entry:
    sampling, wish = ask.request.sampling, GREEDY
    if not sampling.greedy:
        wish = Sampling(MODES[sampling.mode], sampling.temperature, sampling.seed)
    session_id, num_rows = ask.request.session_id, ask.num_rows
    return Entry(
        session_id,
        ask.epoch,
        ask.base_len,
        num_rows,
        ask.num_drafts,
        ask.anchor_id,
        wish,
        ask.first_len,
    )
