"""The drafter cut back: rows sent before their tokens were decided leave no trace in any draft."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.models.deepseek_v4.drafter import load_deepseek_v4_drafter
from common.models.dspark_qwen3 import load_drafter
from common.models.interfaces import DraftModel
from common.tensors import to_bytes
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.tiny import tiny_drafter, tiny_target
from drafter_svc.batcher import Entry, Inbox, LinkOpened, Ping, RowForm, Step, Work
from drafter_svc.engine import DraftEngine, Proposal, StepReply
from drafter_svc.sessions import Limits, Refusal, Session, SessionTable, Status

KV_BLOCK, B, WINDOW = 4, 3, 8
LIMITS = Limits(12, KV_BLOCK, B, 4, 4, 1000)
MODELS: dict[str, DraftModel] = {}


def table(window: int = 0, **changed: int) -> SessionTable:
    made = SessionTable(replace(LIMITS, context_window=window, **changed))
    made.open_link(1)
    return made


def grown(sessions: SessionTable, base_len: int, num_rows: int, first_len: int = 0) -> Session:
    session = sessions.extend(1, 7, 1, base_len, num_rows, 0.0, first_len)
    assert isinstance(session, Session), session
    assert session.length == base_len + num_rows and session.live
    return session


def test_a_cut_keeps_its_blocks_for_the_rows_to_come() -> None:
    sessions = table()
    session = grown(sessions, 0, 10)  # with scratch 13 slots: 4 blocks
    blocks = list(session.block_table)
    assert len(blocks) == 4
    assert grown(sessions, 8, 0) is session and session.block_table == blocks  # 3 would do
    assert grown(sessions, 5, 8).block_table[:4] == blocks
    assert len(session.block_table) == 4 and sessions.num_free_blocks == 8
    grown(sessions, 13, 1)
    assert len(session.block_table) == 5
    sessions.close(1, 7)
    assert not session.live and repr(vars(sessions)) == repr(vars(table()))


def test_a_session_may_be_cut_to_its_first_row_and_not_behind_it() -> None:
    assert grown(table(), 0, 3).length == 3
    sessions = table(WINDOW)
    grown(sessions, 6, 2, first_len=6)
    assert grown(sessions, 6, 1, first_len=6).num_forgotten == 1


def test_cuts_one_after_the_other_may_not_reach_rows_that_went_back() -> None:
    sessions = table(WINDOW)
    grown(sessions, 0, 20)
    session = grown(sessions, 20, 4)
    assert session.num_forgotten == (20 - WINDOW - B) // KV_BLOCK == 2  # rows 0..7
    grown(sessions, 21, 0)
    grown(sessions, 18, 0)
    grown(sessions, 16, 0)  # its window is rows 8..15
    refused = sessions.extend(1, 7, 1, 15, 1, 0.0)
    assert isinstance(refused, Refusal) and refused.status is Status.BASE_MISMATCH
    assert refused.detail == (
        "rows 8..16 are held; base_len is 15, 16..16 fit; first_len is 0, this epoch's is 0"
    )
    assert sessions.num_free_blocks == 12 and not session.live


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, B), st.integers(0, B)), max_size=30))
def test_rounds_of_rows_ahead_always_fit_the_least_room(
    first_len: int, rounds: list[tuple[int, int]]
) -> None:
    """A window, a cut's rows, a step's, scratch, and the first KV block's others (build.py)."""
    needed = WINDOW + B + (B + 1) + B + KV_BLOCK - 1
    sessions = table(WINDOW, num_blocks=-(-needed // KV_BLOCK))
    session, base_len = grown(sessions, first_len, WINDOW, first_len), first_len + WINDOW
    for num_drafts, accepted in rounds:
        grown(sessions, base_len, num_drafts + 1, first_len)
        grown(sessions, base_len + num_drafts + 1, 0, first_len)  # an early ask hopes for the best
        base_len += 1 + min(accepted, num_drafts)
        grown(sessions, base_len, 0, first_len)
        assert session.num_forgotten * KV_BLOCK <= max(first_len, base_len - WINDOW)


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("tiny")
    target = tiny_target(folder / "target", layers=3)
    path = tiny_drafter(folder / "draft", target, "vanilla", good=False, layers=2)
    MODELS["all rows"] = load_drafter(path, target, torch.float32)[0]
    v4 = tiny_deepseek_v4(folder / "v4", good=False, noise=1.0)
    MODELS["a window"] = load_deepseek_v4_drafter(v4, torch.float32)[0]


class Rig:
    """An engine and one session; `entry` takes rows by position from `rows`."""

    def __init__(self, name: str = "all rows") -> None:
        self.model = model = MODELS[name]
        self.block_size = model.config.block_size
        window = model.config.context_window
        limits = replace(LIMITS, num_blocks=40, block_size=self.block_size, context_window=window)
        kv = model.new_kv(limits.num_blocks, KV_BLOCK)
        self.engine = DraftEngine(model, SessionTable(limits), kv)
        self.form = RowForm(False, "fp32", model.config.feature_width)
        self.engine.run([LinkOpened(1)])
        self.step_ids: Iterator[int] = itertools.count(1)

    def step(
        self, rows: Tensor, base_len: int, stop: int, drafts: int = 0, anchor_id: int = 5
    ) -> Step:
        entry = Entry(7, 1, base_len, stop - base_len, drafts, anchor_id)
        data = to_bytes(rows[base_len:stop], "fp32")
        return Step(1, next(self.step_ids), (entry,), data, self.form)

    def run(self, *batch: Work) -> list[Proposal]:
        replies = self.engine.run(batch)
        self.engine.catch_up()
        steps = [reply for reply in replies if isinstance(reply, StepReply)]
        assert len(steps) == sum(isinstance(work, Step) for work in batch)
        return [proposal for reply in steps for proposal in reply.proposals]


def some_rows(name: str, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(60, MODELS[name].config.feature_width, generator=draw)


def same(got: Proposal, want: Proposal) -> None:
    """To the bit: where a row came from must not matter."""
    assert got.status is want.status is Status.OK, got.detail
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.confidence_logits, want.confidence_logits)


def close(got: Proposal, want: Proposal) -> None:
    """The same tokens; rows that were computed in other batches round differently."""
    assert got.confidence_logits is not None and want.confidence_logits is not None, got.detail
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_allclose(got.confidence_logits, want.confidence_logits, atol=1e-4)


@pytest.mark.parametrize("name", ["all rows", "a window"])
@pytest.mark.parametrize("one_batch", [False, True])
@pytest.mark.parametrize("accepted", [0, 2])
def test_an_early_ask_drafts_as_if_only_the_right_rows_had_come(
    name: str, one_batch: bool, accepted: int
) -> None:
    right, anchor = some_rows(name, 1), 20 + 1 + accepted

    def drafts(dropped: Tensor) -> Proposal:
        rig = Rig(name)
        rig.run(rig.step(right, 0, 20))
        early = rig.step(torch.cat([right[:anchor], dropped[anchor:]]), 20, 24)
        ask = rig.step(right, anchor, anchor, B)
        if not one_batch:
            assert rig.run(early) == []
        (proposal,) = rig.run(*[early, ask][not one_batch :])
        return proposal

    fresh = Rig(name)
    fresh.run(fresh.step(right, 0, 20))
    (want,) = fresh.run(fresh.step(right, 20, anchor, B))
    got = drafts(some_rows(name, 2))
    if one_batch:  # else its rows were projected beside others, which rounds differently
        same(got, want)
    same(got, drafts(some_rows(name, 3)))
    close(got, want)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["all rows", "a window"]),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.sets(st.integers(0, 15)),
)
def test_no_mix_of_guesses_and_corrections_changes_a_draft(
    name: str, rounds: list[tuple[int, int, int, bool]], cuts: set[int]
) -> None:
    """Rows ahead, an early ask, perhaps a correction; the batches begin anywhere."""
    rig, right = Rig(name), some_rows(name, 3)
    steps, base_len = [rig.step(right, 0, 13)], 13
    for number, (num_drafts, guessed, accepted, corrects) in enumerate(rounds):
        stop, guess = base_len + 1 + num_drafts, base_len + 1 + min(guessed, num_drafts)
        anchor = base_len + 1 + min(accepted, num_drafts) if corrects else guess
        ahead = torch.cat([right[:anchor], some_rows(name, 9 + number)[anchor:]])
        steps.append(rig.step(ahead, base_len, stop))
        steps.append(rig.step(ahead, guess, guess, 2, anchor_id=40))
        if corrects:  # what the guess left out was overwritten: it comes again
            from_len = min(guess, anchor)
            steps.append(rig.step(right, from_len, anchor, 2, anchor_id=41))
        base_len = anchor
    steps.append(rig.step(right, base_len, base_len, B, anchor_id=42))
    batch, proposals = list[Work](), list[Proposal]()
    for number, step in enumerate(steps):
        batch.append(step)
        if number in cuts or step is steps[-1]:
            proposals += rig.run(*batch)
            batch = []
    fresh = Rig(name)
    (want,) = fresh.run(fresh.step(right, 0, base_len, B, anchor_id=42))
    close(proposals[-1], want)


def test_another_anchor_at_the_same_position_supersedes_the_guess() -> None:
    rig, fresh, rows = Rig(), Rig(), some_rows("all rows", 4)
    guess, ask = rig.step(rows, 9, 9, B, anchor_id=5), rig.step(rows, 9, 9, B, anchor_id=6)
    rig.run(rig.step(rows, 0, 9))
    (got,) = rig.run(guess, ask)
    fresh.run(fresh.step(rows, 0, 9))
    (want,) = fresh.run(fresh.step(rows, 9, 9, B, anchor_id=6))
    assert got.entry is ask.entries[0] and rig.engine.take_counts() == {"superseded": 1}
    same(got, want)


def test_a_cut_too_far_back_hurts_only_its_session_and_says_what_is_held() -> None:
    rig, rows = Rig(), some_rows("all rows", 5)
    rig.run(rig.step(rows, 0, 20))
    far = 19 - rig.block_size
    (refused,) = rig.run(rig.step(rows, far, far, B))
    assert refused.status is Status.BASE_MISMATCH
    assert f"rows 0..20 are held; base_len is {far}, {far + 1}..20 fit" in refused.detail
    assert rig.engine.num_sessions == 0


def test_rows_before_the_first_are_refused_by_value() -> None:
    rig, rows = Rig("a window"), some_rows("a window", 6)
    step = rig.step(rows, 0, 30, B)
    (refused,) = rig.run(replace(step, entries=(replace(step.entries[0], first_len=5),)))
    assert refused.status is Status.INVALID
    assert refused.detail == "base_len 0: the rows begin at first_len, 5"


def test_a_batch_whose_every_ask_is_superseded_meanwhile_is_not_finished() -> None:
    rig, rows, inbox = Rig(), some_rows("all rows", 7), Inbox()
    rig.run(rig.step(rows, 0, 9))
    guess, ask = rig.step(rows, 9, 9, B, anchor_id=5), rig.step(rows, 8, 8, B, anchor_id=6)
    inbox.put(ask)
    (reply,) = rig.engine.run([guess], inbox.supersedes)
    assert isinstance(reply, StepReply) and reply.step_id == guess.step_id
    assert reply.proposals == [] and rig.engine.take_counts() == {"superseded": 1}
    inbox.take()
    inbox.put(Ping(1, 3))
    rig.engine.catch_up()
    (done,) = rig.engine.run([ask], inbox.supersedes)
    fresh = Rig()
    fresh.run(fresh.step(rows, 0, 9))
    (want,) = fresh.run(fresh.step(rows, 8, 8, B, anchor_id=6))
    assert isinstance(done, StepReply)
    same(done.proposals[0], want)
