"""The drafter's engine with V4's drafter: rows of the window are as good as all rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.models.deepseek_v4.drafter import DSparkV4, load_deepseek_v4_drafter
from common.tensors import to_bytes
from common.testing.deepseek_v4 import tiny_deepseek_v4
from drafter_svc.batcher import Entry, LinkOpened, RowForm, Step
from drafter_svc.engine import DraftEngine, Proposal, StepReply
from drafter_svc.sessions import Limits, SessionTable, Status

WINDOW, KV_BLOCK, B = 8, 4, 5
LENGTH = 90


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DSparkV4:
    torch.set_num_threads(1)
    folder: Path = tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), good=False, noise=1.0)
    return load_deepseek_v4_drafter(folder, torch.float32)[0]


@pytest.fixture(scope="module")
def rows(model: DSparkV4) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(LENGTH, model.config.feature_width, generator=draw)


class Rig:
    """An engine and one link."""

    def __init__(self, model: DSparkV4, num_blocks: int = 40) -> None:
        limits = Limits(num_blocks, KV_BLOCK, B, 8, 8, 4096, WINDOW, evict_idle_s=0.0)
        self.sessions = SessionTable(limits)
        self.engine = DraftEngine(model, self.sessions, model.new_kv(num_blocks, KV_BLOCK))
        self.form = RowForm(False, "fp32", model.config.feature_width)
        self.engine.run([LinkOpened(1)])
        self.step_id = 0

    def step(self, rows: Tensor, *entries: Entry) -> Step:
        self.step_id += 1
        own = [rows[e.base_len : e.anchor_position] for e in entries]
        return Step(1, self.step_id, entries, to_bytes(torch.cat(own), "fp32"), self.form)

    def run(self, *steps: Step) -> list[Proposal]:
        replies = self.engine.run(steps)
        self.engine.catch_up()
        return [p for reply in replies if isinstance(reply, StepReply) for p in reply.proposals]


def entry(first: int, base: int, stop: int, *, drafts: int = 0, session_id: int = 1) -> Entry:
    made = Entry(session_id, 1, base, stop - base, drafts, anchor_id=stop % 90)
    return replace(made, first_len=first)


def ids(proposal: Proposal) -> list[int]:
    assert proposal.status is Status.OK and proposal.token_ids is not None, proposal
    return proposal.token_ids.tolist()


def test_the_window_alone_gives_the_same_drafts_as_all_rows(model: DSparkV4, rows: Tensor) -> None:
    (whole,) = Rig(model).run(Rig(model).step(rows, entry(0, 0, 61, drafts=B)))
    rig = Rig(model)
    assert not rig.run(rig.step(rows, entry(53, 53, 58)))
    (window,) = rig.run(rig.step(rows, entry(53, 58, 61, drafts=B)))
    assert ids(window) == ids(whole) and len(set(ids(whole))) > 1


def test_a_long_session_keeps_few_blocks_and_drafts_on(model: DSparkV4, rows: Tensor) -> None:
    """Beside another one, so that blocks change hands."""
    rig, most = Rig(model, num_blocks=14), 0
    starts = {1: 3, 2: 20}
    for round_number in range(16):
        entries = []
        for session_id, first in starts.items():
            base = first if not round_number else first + 8 + 3 * (round_number - 1)
            stop = first + 8 + 3 * round_number
            entries.append(entry(first, base, stop, drafts=B, session_id=session_id))
        for one, proposal in zip(entries, rig.run(rig.step(rows, *entries)), strict=True):
            alone = Rig(model)
            whole = entry(0, 0, one.anchor_position, drafts=B, session_id=one.session_id)
            (want,) = alone.run(alone.step(rows, whole))
            assert ids(proposal) == ids(want)
        most = max(most, 14 - rig.sessions.num_free_blocks)
    assert most <= 2 * 6


def test_rows_that_leave_the_window_within_a_batch_are_skipped(
    model: DSparkV4, rows: Tensor
) -> None:
    rig, alone = Rig(model), Rig(model)
    steps = [rig.step(rows, entry(0, n, n + 6, drafts=B)) for n in range(0, 72, 6)]
    (last,) = rig.run(*steps)
    (want,) = alone.run(alone.step(rows, entry(0, 0, 72, drafts=B)))
    assert ids(last) == ids(want)


def test_an_evicted_session_that_comes_back_drafts_the_same(model: DSparkV4, rows: Tensor) -> None:
    """With the window's rows alone, in blocks that another session has written meanwhile."""
    rig, alone = Rig(model, num_blocks=6), Rig(model)
    (kept,) = rig.run(rig.step(rows, entry(53, 53, 61, drafts=B)))
    (other,) = rig.run(rig.step(rows, entry(12, 12, 20, drafts=B, session_id=2)))
    (gone,) = rig.run(rig.step(rows, entry(53, 61, 63, drafts=B)))
    assert kept.status is other.status is Status.OK and gone.status is Status.UNKNOWN_SESSION
    (back,) = rig.run(rig.step(rows, replace(entry(55, 55, 63, drafts=B), epoch=2)))
    (want,) = alone.run(alone.step(rows, entry(0, 0, 63, drafts=B)))
    assert ids(back) == ids(want)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (entry(54, 54, 61, drafts=B), "first_len 54 leaves out rows that an anchor at 61 needs"),
        (entry(62, 58, 61), "base_len 58: the rows begin at first_len, 62"),
    ],
)
def test_missing_rows_are_refused(model: DSparkV4, rows: Tensor, wrong: Entry, said: str) -> None:
    rig = Rig(model)
    (refused,) = rig.run(rig.step(rows, wrong))
    assert refused.status is Status.INVALID and said in refused.detail
    assert rig.sessions.num_sessions == 0
