"""drafter_svc/engine.py on a tiny real checkpoint: batching, chunking, fencing, bad entries."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.dspark_qwen3 import DSparkQwen3, load_drafter
from common.tensors import to_bytes
from common.testing.tiny import Head, tiny_drafter, tiny_target
from drafter_svc.batcher import (
    GREEDY,
    DraftMode,
    Entry,
    LinkClosed,
    LinkOpened,
    Ping,
    RowForm,
    Sampling,
    Step,
    Work,
)
from drafter_svc.engine import DraftEngine, Evicted, Pong, Proposal, Reply, StepReply
from drafter_svc.sessions import Limits, SessionTable, Status

torch.set_num_threads(1)
KV_BLOCK = 4
MODELS: dict[Head, DSparkQwen3] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("tiny")
    target = tiny_target(folder / "target", layers=3)
    for head, draft_vocab in (("vanilla", 40), ("gated", None), ("rnn", None), ("none", None)):
        path = tiny_drafter(
            folder / head, target, head, good=False, layers=2, draft_vocab=draft_vocab
        )
        MODELS[head] = load_drafter(path, target, torch.float32)[0]


def feature_rows(seed: int, num_rows: int) -> torch.Tensor:
    """RAW_LAYERS rows of one request."""
    width = MODELS["vanilla"].config.feature_width
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


class Rig:
    """An engine, one link, and verifier-side bookkeeping."""

    def __init__(
        self, head: Head = "vanilla", num_blocks: int = 64, max_sessions: int = 16
    ) -> None:
        self.model = MODELS[head]
        self.limits = Limits(
            num_blocks, KV_BLOCK, self.model.config.block_size, max_sessions, max_sessions, 200
        )
        self.sessions = SessionTable(self.limits)
        self.kv = self.model.new_kv(num_blocks, KV_BLOCK)
        self.engine = DraftEngine(self.model, self.sessions, self.kv)
        self.form = RowForm(False, "fp32", self.model.config.feature_width)
        self.step_ids = itertools.count(1)
        self.engine.run([LinkOpened(1), LinkOpened(2)])

    def step(
        self, *entries: tuple[Entry, torch.Tensor], close: tuple[int, ...] = (), link: int = 1
    ) -> Step:
        rows = b"".join(to_bytes(rows, "fp32") for _, rows in entries)
        own = tuple(entry for entry, _ in entries)
        return Step(link, next(self.step_ids), own, rows, self.form, close)

    def run(self, *batch: Work) -> list[Reply]:
        replies = self.engine.run(batch)
        self.engine.catch_up()
        return replies

    def proposals(self, *batch: Work) -> list[Proposal]:
        replies = self.run(*batch)
        return [p for reply in replies if isinstance(reply, StepReply) for p in reply.proposals]


def ask(
    session_id: int,
    rows: torch.Tensor,
    start: int,
    stop: int,
    num_drafts: int = 0,
    anchor_id: int = 3,
    epoch: int = 1,
    sampling: Sampling = GREEDY,
    first_len: int = 0,
) -> tuple[Entry, torch.Tensor]:
    """Rows [start, stop) of a request, and drafts after the anchor at `stop` if wanted."""
    num_rows = stop - start
    entry = Entry(session_id, epoch, start, num_rows, num_drafts, anchor_id, sampling, first_len)
    return entry, rows[start:stop]


def straight_line(head: Head, rows: torch.Tensor, anchor_id: int) -> tuple[list[int], list[float]]:
    """Greedy drafts and confidences of one request, alone, from a cache of its own."""
    model, size = MODELS[head], MODELS[head].config.block_size
    kv = model.new_kv(1, len(rows) + size)
    positions = torch.arange(len(rows))
    model.ingest(model.project(rows), kv, positions, positions)
    anchors = torch.tensor([anchor_id])
    hidden, logits = model.block(anchors, torch.tensor([len(rows)]), size, kv, [[0]])
    previous, state, drafts, confidences = anchors, model.start_state(1), [], []
    for k in range(size):
        confidence = model.confidence(hidden[:, k], previous)
        assert confidence is not None
        confidences.append(float(confidence))
        bias, state = model.bias(previous, hidden[:, k], state)
        corrected = logits[:, k] if bias is None else logits[:, k] + bias
        previous = model.to_target_ids(corrected.argmax(-1))
        drafts.append(int(previous))
    return drafts, confidences


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_a_batch_of_ragged_sessions_drafts_what_each_would_alone(head: Head) -> None:
    rig, lengths = Rig(head), (1, 3, 4, 17, 30)
    contexts = [feature_rows(n, n) for n in lengths]
    entries = [
        ask(i, rows, 0, len(rows), num_drafts=4, anchor_id=i + 5) for i, rows in enumerate(contexts)
    ]
    # two verifiers' steps in one batch
    proposals = rig.proposals(rig.step(*entries[:2]), rig.step(*entries[2:], link=2))
    assert len(proposals) == len(lengths)
    for i, (rows, proposal) in enumerate(zip(contexts, proposals, strict=True)):
        drafts, confidences = straight_line(head, rows, i + 5)
        assert proposal.entry.session_id == i and proposal.status is Status.OK
        assert proposal.token_ids is not None and proposal.token_ids.tolist() == drafts
        np.testing.assert_allclose(proposal.confidence_logits, confidences, atol=1e-4)
        assert proposal.candidate_ids is None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.booleans(),
)
def test_chunks_and_rounds_in_between_do_not_change_a_draft(
    chunks: list[int], drafting: list[bool], one_batch: bool
) -> None:
    """Block keys are never kept: drafting on the way leaves the context as it was."""
    rig, total = Rig("vanilla"), sum(chunks)
    rows, other = feature_rows(1, total), feature_rows(2, 5)
    steps, start = [rig.step(ask(9, other, 0, 5))], 0
    for chunk, drafts in zip(chunks, drafting, strict=False):
        asks = [ask(1, rows, start, start + chunk, 4 if drafts else 0, anchor_id=7)]
        steps.append(rig.step(*asks, ask(9, other, 5, 5, num_drafts=2)))
        start += chunk
    last = rig.step(ask(1, rows, total, total, num_drafts=4, anchor_id=11))
    if one_batch:
        *_, proposal = rig.proposals(*steps, last)
    else:
        for step in steps:
            rig.run(step)
        (proposal,) = rig.proposals(last)
    assert proposal.token_ids is not None and proposal.confidence_logits is not None
    drafts, confidences = straight_line("vanilla", rows, 11)
    assert proposal.token_ids.tolist() == drafts
    np.testing.assert_allclose(proposal.confidence_logits, confidences, atol=1e-4)


def test_projected_rows_give_the_same_drafts_as_raw_ones() -> None:
    rig, rows = Rig("gated"), feature_rows(3, 12)
    projected = rig.model.project(rows)
    form = RowForm(True, "fp32", projected.shape[1])
    entry, _ = ask(1, rows, 0, 12, num_drafts=4)
    step = Step(1, 1, (entry,), to_bytes(projected, "fp32"), form)
    (proposal,) = rig.proposals(step)
    assert proposal.token_ids is not None
    assert proposal.token_ids.tolist() == straight_line("gated", rows, 3)[0]


def test_fewer_drafts_are_the_first_ones_of_the_block() -> None:
    rig, rows = Rig("rnn"), feature_rows(4, 6)
    full, short = rig.proposals(
        rig.step(ask(1, rows, 0, 6, num_drafts=4), ask(2, rows, 0, 6, num_drafts=2))
    )
    assert full.token_ids is not None and short.token_ids is not None
    assert short.token_ids.tolist() == full.token_ids.tolist()[:2]
    assert short.confidence_logits is not None and len(short.confidence_logits) == 2


def test_a_superseded_ask_is_ingested_but_not_drafted() -> None:
    rig, rows = Rig(), feature_rows(5, 8)
    first = rig.step(ask(1, rows, 0, 6, num_drafts=4, anchor_id=4))
    second = rig.step(ask(1, rows, 6, 8, num_drafts=4, anchor_id=9))
    early, late = rig.run(first, second)
    assert isinstance(early, StepReply) and early.proposals == []
    assert isinstance(late, StepReply) and late.proposals[0].token_ids is not None
    assert late.proposals[0].token_ids.tolist() == straight_line("vanilla", rows, 9)[0]
    assert rig.engine.take_counts() == {"superseded": 1}


def test_a_stale_epoch_is_dropped_and_counted_and_the_session_goes_on() -> None:
    rig, rows = Rig(), feature_rows(6, 9)
    rig.run(rig.step(ask(1, rows, 0, 8, epoch=2)))
    assert rig.proposals(rig.step(ask(1, rows, 0, 3, num_drafts=4, epoch=1))) == []
    assert rig.engine.take_counts() == {"stale": 1}
    (proposal,) = rig.proposals(rig.step(ask(1, rows, 8, 9, num_drafts=4, epoch=2)))
    assert proposal.status is Status.OK


BAD = {
    "anchor": ({"anchor_id": 64}, "anchor_id 64 is outside 0..63"),
    "negative": ({"anchor_id": -1}, "anchor_id -1 is outside"),
    "count": ({"num_drafts": 5}, "num_draft_tokens 5: a block has 4"),
    "cold": ({"sampling": Sampling(DraftMode.SAMPLED, 0.0)}, "temperature 0.0 must be above 0"),
    "nan": ({"sampling": Sampling(DraftMode.COUPLED, float("nan"))}, "temperature nan"),
    "first": ({"first_len": 5}, "first_len 5: this drafter needs all rows from position 0 on"),
    "top_k": ({"sampling": Sampling(DraftMode.SAMPLED, 1.0, 0, 2000)}, "top_k 2000"),
}


@pytest.mark.parametrize("case", [*BAD, "rows"])
def test_a_bad_entry_hurts_only_its_own_session(case: str) -> None:
    rig, rows = Rig(), feature_rows(7, 6)
    rig.run(rig.step(ask(1, rows, 0, 5), ask(2, rows, 0, 5)))
    change, detail = BAD.get(case, ({}, "rows 5..5 hold NaN or infinity"))
    bad_rows = rows.clone()
    if case == "rows":
        bad_rows[5, 3] = torch.inf
    bad = ask(1, bad_rows, 5, 6, **{"num_drafts": 4, **change})  # type: ignore[arg-type]
    refused, fine = rig.proposals(rig.step(bad, ask(2, rows, 5, 6, num_drafts=4)))
    assert refused.status is Status.INVALID and detail in refused.detail
    assert fine.status is Status.OK and fine.token_ids is not None
    assert fine.token_ids.tolist() == straight_line("vanilla", rows, 3)[0]
    (gone,) = rig.proposals(rig.step(ask(1, rows, 6, 6, num_drafts=4)))
    assert gone.status is Status.UNKNOWN_SESSION


def test_rows_of_a_session_that_ends_in_the_same_batch_never_reach_its_successor() -> None:
    """The freed blocks go to another session at once; the late rows must not overwrite it."""
    rig = Rig(num_blocks=5)
    old, new = feature_rows(8, 16), feature_rows(9, 15)
    (proposal,) = rig.proposals(
        rig.step(ask(1, old, 0, 16)),
        rig.step(ask(2, new, 0, 15, num_drafts=4), close=(1,)),
    )
    assert proposal.token_ids is not None
    assert proposal.token_ids.tolist() == straight_line("vanilla", new, 3)[0]


def test_pings_answer_after_the_steps_before_them_and_a_closed_link_leaves_nothing() -> None:
    rig, rows = Rig(), feature_rows(10, 4)
    replies = rig.run(rig.step(ask(1, rows, 0, 4, num_drafts=1)), Ping(1, 77))
    assert [type(r) for r in replies] == [StepReply, Pong]
    assert replies[1] == Pong(1, 77, 1)
    rig.run(LinkClosed(1))
    assert rig.engine.num_sessions == 0 and rig.sessions.num_free_blocks == 64


def test_an_eviction_is_told_before_the_answer_that_it_made_room_for() -> None:
    rig, rows = Rig(max_sessions=1), feature_rows(11, 2)
    rig.run(rig.step(ask(1, rows, 0, 2)))
    session = rig.sessions.extend(1, 1, 1, 2, 0, now=-100.0)  # unused for long
    notice, reply = rig.run(rig.step(ask(2, rows, 0, 2, num_drafts=1), link=2))
    assert notice == Evicted(1, (1,)) and not session.live
    assert isinstance(reply, StepReply) and reply.proposals[0].status is Status.OK
