"""foresight.py and the head's two parts: what is guessed, when and for whom; nothing changes by it.

The drafter here only notes what it is told; a bias decides whether likely or unlikely ids come.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.models.interfaces import Numerics, Target
from common.models.registry import load_target
from common.nn.vocab_head import NOT_YET, VocabHead
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.no_text import NoText
from common.testing.tiny import tiny_target
from verifier_svc.drafting import Draft, Drafts, FeatureSource, NoDrafter
from verifier_svc.foresight import LEAST_RIGHT, NEWEST_WEIGHT, STEPS_BETWEEN_TRIALS
from verifier_svc.request import Outlook, Plan, Request
from verifier_svc.runner import StepWatcher
from verifier_svc.stopping import StopCursor

VOCAB = 64
LIKELY, UNLIKELY = {5: 100.0}, {50: 100.0}  # logit_bias: always this id
BASE = {"prompt_ids": [1, 2], "temperature": 0.0, "logit_bias": LIKELY}


class Notes(NoDrafter):
    """Drafts the same id over and over; writes down what it is told."""

    def __init__(self, draft: tuple[int, ...] = (), *, may_look_ahead: bool = True) -> None:
        self.draft, self.wants, self.step_id = draft, may_look_ahead, 0
        self.rows: list[tuple[int, list[Outlook]]] = []  # by step id
        self.guesses: list[tuple[int, list[Outlook]]] = []

    @property
    def may_look_ahead(self) -> bool:
        return self.wants

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        self.step_id = plan.step_id
        return Drafts({
            entry.request.session_id: Draft(self.draft[: entry.max_drafts])
            for entry in plan.entries
            if entry.max_drafts and self.draft
        })  # fmt: skip

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        told = len(self.rows) and self.rows[-1][0] == self.step_id
        (self.guesses if told else self.rows).append((self.step_id, list(outlooks)))


def run(make_rig: Any, model: Any, notes: Notes, *asks: dict, **sizes: int) -> list[Request]:
    rig = make_rig(model, None, notes, max_drafts=4, taps=(0,), **sizes)
    return rig.run([rig.ask(f"r{i}", **ask) for i, ask in enumerate(asks)])


def test_guesses_that_are_mostly_wrong_become_rare(make_rig: Any, tiny_models: Any) -> None:
    notes = Notes()
    run(make_rig, tiny_models()[0], notes, {**BASE, "logit_bias": UNLIKELY, "max_tokens": 60})
    share, num_bad = 1.0, 0
    while share >= LEAST_RIGHT:
        share, num_bad = share * (1 - NEWEST_WEIGHT), num_bad + 1
    first = notes.rows[0][0]
    steps = [step_id - first + 1 for step_id, _ in notes.guesses]
    trials = [n * STEPS_BETWEEN_TRIALS for n in range(1, 4)]
    assert steps == [*range(1, num_bad + 1), *trials]
    assert len(notes.rows) > trials[-1]  # rows are told all the same


def test_right_guesses_go_on_and_bring_the_others_back(make_rig: Any, tiny_models: Any) -> None:
    notes = Notes((5, 5))
    rig = make_rig(tiny_models()[0], None, notes, max_drafts=4, taps=(0,))
    foresight = rig.engine._foresight
    request = rig.ask("r", **{**BASE, "max_tokens": 100})
    while foresight.share_right(request) >= LEAST_RIGHT:
        foresight.learn(request, right=False)
    rig.run([request])
    first = notes.rows[0][0]
    trial = STEPS_BETWEEN_TRIALS
    steps = [step_id - first + 1 for step_id, _ in notes.guesses]
    assert steps == [*range(trial, trial + len(steps))] and len(steps) > 10
    for step_id, [outlook] in notes.guesses[:-1]:  # two drafts and a third token in each
        assert (outlook.anchor_id, outlook.max_drafts) == (5, min(4, 99 - (outlook.start - 1)))
        rounds = step_id - first + 1
        assert outlook.start == len([1, 2]) + 3 * rounds
        assert [told.start for told in dict(notes.rows)[step_id]] == [outlook.start]
    assert foresight.share_right(request) > LEAST_RIGHT + 0.1


def test_text_of_unlikely_ids_stops_no_guess_about_others(make_rig: Any, tiny_models: Any) -> None:
    notes, base = Notes((5,)), {**BASE, "max_tokens": 60}
    _, likely = run(make_rig, tiny_models()[0], notes, {**base, "logit_bias": UNLIKELY}, base)
    told = [[o.request for o in outlooks] for _, outlooks in notes.guesses]
    last_rounds = told[20:25]  # by then the first one is guessed about in trials only
    assert last_rounds and all(requests == [likely] for requests in last_rounds)


def test_only_guesses_that_are_told_are_counted(make_rig: Any, tiny_models: Any) -> None:
    notes, base = Notes(), {**BASE, "max_tokens": 60}
    off = {**base, "logit_bias": UNLIKELY, "speculation_enabled": False}
    run(make_rig, tiny_models()[0], notes, base, off, off)
    assert len(notes.guesses) == len(notes.rows) > 50


def anchors(notes: Notes, request: Request) -> list[int]:
    """Positions of the anchors that were guessed, as places in the output."""
    told = [o for _, outlooks in notes.guesses for o in outlooks if o.request is request]
    return [outlook.start - request.num_prompt for outlook in told]


def test_requests_that_the_guess_ends_are_not_asked_for(make_rig: Any, tiny_models: Any) -> None:
    notes, long = Notes(), {**BASE, "max_tokens": 20}
    requests = run(
        make_rig,
        tiny_models()[0],
        notes,
        {**long, "stop_token_ids": [5], "min_tokens": 6},
        {**long, "max_tokens": 7},
        long,
    )
    by_stop, by_length, free = (anchors(notes, request) for request in requests)
    assert [request.num_output for request in requests] == [7, 7, 20]
    assert by_stop == [1, 2, 3, 4, 5]  # the token at place 6 ends it
    assert by_length == [1, 2, 3, 4]  # behind place 5 only one more may come: no draft is needed
    assert free == list(range(1, 18))


@pytest.mark.parametrize(
    ("stops", "token_ids", "ends"),
    [
        ({}, (1, 63), True),
        ({"ignore_eos": True}, (1, 63), False),
        ({"min_tokens": 1}, (63, 1), False),
        ({"min_tokens": 1}, (1, 63), True),
        ({"stop_token_ids": [9]}, (9,), True),
        ({"stop_token_ids": [9], "ignore_eos": True}, (1, 2, 9), True),
        ({"stop_token_ids": [9]}, (1, 2, 3), False),
    ],
)
def test_the_end_by_id_is_foreseen_as_it_will_come(
    make_rig: Any, tiny_models: Any, stops: dict, token_ids: tuple[int, ...], ends: bool
) -> None:
    rig = make_rig(tiny_models()[0])
    request = rig.ask("r", [1, 2], max_tokens=9, **stops)
    cursor = StopCursor(request, NoText())
    assert cursor.ends_by_id(token_ids) is ends and request.token_ids == [1, 2]
    for token_id in token_ids:
        if request.finish_reason is None:
            cursor.push(token_id)
    assert (request.finish_reason is not None) is ends


@pytest.mark.parametrize(
    ("notes", "wishes"),
    [
        (Notes(), {"speculation_enabled": False}),
        (Notes(), {"max_draft_tokens": 0}),
        (Notes(may_look_ahead=False), {}),
    ],
)
def test_where_nobody_drafts_nothing_is_guessed(
    make_rig: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch, notes: Notes, wishes: dict
) -> None:
    monkeypatch.delattr("verifier_svc.foresight.Watch")  # none is made
    run(make_rig, tiny_models()[0], notes, {**BASE, "max_tokens": 9, **wishes})
    assert not notes.rows and not notes.guesses


def test_prompts_and_requests_without_drafts_are_left_out(make_rig: Any, tiny_models: Any) -> None:
    notes = Notes()
    off, late, on = run(
        make_rig,
        tiny_models()[0],
        notes,
        {**BASE, "max_tokens": 30, "speculation_enabled": False},
        {**BASE, "max_tokens": 9, "prompt_ids": [3] * 60},
        {**BASE, "max_tokens": 9},
        max_batch_tokens=12,
    )
    told = [o.request for _, outlooks in [*notes.rows, *notes.guesses] for o in outlooks]
    assert on in told and late in told and off not in told
    first = next(step for step, outlooks in notes.rows if late in [o.request for o in outlooks])
    assert first > 6  # after its prompt's last chunk and its first token


# The head in two parts.


def models(folder: Path) -> dict[str, Callable[[], Target]]:
    def dense(family: Any, numerics: Numerics, **sizes: Any) -> Target:
        dtype = torch.float32 if numerics == "fast" else torch.bfloat16
        path = tiny_target(folder / family, family, vocab=VOCAB, **sizes)
        return load_target(path, dtype, "cpu", numerics)[0]

    def v4(numerics: Numerics) -> Target:
        dtype = torch.float32 if numerics == "fast" else torch.bfloat16
        return load_target(tiny_deepseek_v4(folder / "v4"), dtype, "cpu", numerics)[0]

    return {
        "dense": lambda: dense("llama", "fast"),
        "tied": lambda: dense("llama", "fast", bigram=False),
        "dense invariant": lambda: dense("qwen3", "batch_invariant"),
        "v4": lambda: v4("fast"),
        "v4 invariant": lambda: v4("batch_invariant"),
    }


@pytest.mark.parametrize("name", models(Path()))
def test_looking_at_the_likely_part_changes_no_bit(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = models(tmp_path)[name]()
    vocab_size = model.config.vocab_size
    num_likely, seen = vocab_size // 3, list[Tensor]()
    draw = torch.Generator().manual_seed(0)
    for num_rows in (1, 5, 8, 20):
        hidden = torch.randn(num_rows, model.config.hidden_size, generator=draw)
        hidden = hidden.to(torch.bfloat16 if "invariant" in name else torch.float32)
        seen.clear()
        watched = model.logits(hidden, lambda logits: seen.append(logits.clone()))
        assert watched.dtype is torch.float32 and watched.shape == (num_rows, vocab_size)
        assert torch.equal(watched, model.logits(hidden))
        (early,) = seen
        assert torch.equal(early[:, :num_likely], watched[:, :num_likely])
        assert (early[:, num_likely:] == NOT_YET).all() and not (watched == NOT_YET).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_parts_together_are_the_whole_product(dtype: torch.dtype) -> None:
    """Large enough for packed weights."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(1601, 192, generator=draw).to(dtype)
    rows = torch.randn(16, 192, generator=draw).to(dtype)
    head = VocabHead(weight)
    want = (rows.float() @ weight.float().T)[:11]
    for slices in ([rows[:11]], [rows[:8], rows[8:]]):
        got = head(slices, 11)
        assert torch.equal(got, head(slices, 11, lambda _: None))
        torch.testing.assert_close(got, want, atol=0.2 if dtype is torch.bfloat16 else 1e-3, rtol=0)


def test_rows_are_there_when_they_are_told_and_before_the_logits(
    make_rig: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, checked = [], 0

    class Spy(StepWatcher):
        def __init__(self, inner: StepWatcher, rig: Any, plan: Plan, drafts: Drafts) -> None:
            self._inner, self._rig, self._plan, self._drafts = inner, rig, plan, drafts

        def _read(self) -> bytes:
            spans = []
            for entry in self._plan.entries:
                draft = self._drafts.of(entry.request) or Draft(())
                stop = entry.start + entry.num_tokens + len(draft.token_ids)
                spans.append((entry.request, entry.start, stop))
            return self._rig.runner.features.read(spans)

        def rows_stored(self) -> None:
            order.append("rows")
            self._rows = self._read()
            self._inner.rows_stored()

        def logits_likely(self, logits: Tensor) -> None:
            order.append("logits")
            self._inner.logits_likely(logits)

        def ended(self, verdicts: Any) -> None:
            nonlocal checked
            order.append("end")
            assert self._rows == self._read() and any(self._rows)
            checked += 1
            self._inner.ended(verdicts)

    rig = make_rig(tiny_models()[0], None, Notes((5, 9)), max_drafts=4, taps=(0, 1))
    watch = rig.engine._foresight.watch
    monkeypatch.setattr(
        rig.engine._foresight,
        "watch",
        lambda plan, drafts: (w := watch(plan, drafts)) and Spy(w, rig, plan, drafts),
    )
    rig.run([rig.ask(f"r{i}", [i + 1] * 3, temperature=0.0, max_tokens=20) for i in range(3)])
    assert checked > 10 and order == ["rows", "logits", "end"] * checked
