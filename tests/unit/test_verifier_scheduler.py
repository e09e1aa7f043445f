"""Scheduler and KV blocks against a fake target that remembers what every slot holds.

The fake target's next token is a fixed function of the tokens before, so outputs have one right
answer, and a row may only run if every slot that it reads holds its own request's right token.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.testing.no_text import NoText
from verifier_svc.drafting import Draft, Drafts
from verifier_svc.events import Delta, Event, Finished
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import (
    FinishReason,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verdict,
)
from verifier_svc.scheduler import Scheduler, SchedulerLimits

VOCAB = 17
EOS = 3


def next_token(token_ids: list[int]) -> int:
    return (sum((i + 3) * t for i, t in enumerate(token_ids[-4:])) + len(token_ids)) % VOCAB


def plain(request: Request) -> list[int]:
    """What a request must end up with, by the plainest loop."""
    token_ids = list(request.token_ids[: request.num_prompt])
    while len(token_ids) < request.max_len:
        token_ids.append(next_token(token_ids))
        if len(token_ids) - request.num_prompt > request.stopping.min_tokens and (
            token_ids[-1] == EOS or token_ids[-1] in request.stopping.stop_token_ids
        ):
            break
    return token_ids


def make_request(
    number: int,
    num_prompt: int = 3,
    max_tokens: int = 8,
    speculation: SpeculationParams | None = None,
    **stops: object,
) -> Request:
    return Request(
        request_id=f"r{number}",
        session_id=number,
        token_ids=[(number * 5 + i) % VOCAB for i in range(num_prompt)],
        num_prompt=num_prompt,
        sampling=SamplingParams(),
        stopping=StopParams(max_tokens=max_tokens, **stops),  # type: ignore[arg-type]
        speculation=speculation or SpeculationParams(),
        eos_token_ids=frozenset({EOS}),
        max_len=num_prompt + max_tokens,
    )


class FakeTarget:
    """Runs plans over a slot memory and asserts that nothing foreign is ever read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[int, tuple[Request, int, int]] = {}

    def slot(self, request: Request, position: int) -> int:
        size = self.scheduler.kv_blocks.kv_block_size
        return request.block_table[position // size] * size + position % size

    def run(self, plan: Plan, drafts: Drafts) -> dict[int, Verdict]:
        verdicts = {}
        for index, entry in enumerate(plan.entries):
            request, start = entry.request, entry.start
            known = start + entry.num_tokens
            assert known <= len(request.token_ids)
            draft = drafts.of(request)
            draft_ids = draft.token_ids if draft else ()
            for position in range(start):
                held = self.memory[self.slot(request, position)]
                assert held == (request, position, request.token_ids[position])
            row_ids = [*request.token_ids[start:known], *draft_ids]
            for position, token in enumerate(row_ids, start=start):
                assert position <= request.max_len - 2, "a row past the last token that can be read"
                self.memory[self.slot(request, position)] = (request, position, token)
            if entry.samples:
                assert known == len(request.token_ids)
                verdicts[index] = self.verdict(request.token_ids, draft_ids)
        return verdicts

    @staticmethod
    def verdict(token_ids: list[int], draft_ids: tuple[int, ...]) -> Verdict:
        emitted: list[int] = []
        for draft_id in (*draft_ids, None):
            emitted.append(next_token(token_ids + emitted))
            if draft_id != emitted[-1]:
                break
        return Verdict(len(draft_ids), len(emitted) - 1, tuple(emitted))


def make_scheduler(
    num_blocks: int,
    kv_block_size: int,
    limits: SchedulerLimits,
    released: list[Request] | None = None,
) -> Scheduler:
    release: Callable[[Request], None] = ([] if released is None else released).append
    return Scheduler(KVBlocks(num_blocks, kv_block_size), limits, lambda _: NoText(), release)


def step(scheduler: Scheduler, target: FakeTarget, drafts: Drafts | None = None) -> list[Event]:
    plan = scheduler.plan()
    drafts = drafts or Drafts()
    return scheduler.commit(plan, drafts, target.run(plan, drafts))


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, object]:
    kv_block_size = draw(st.integers(1, 5))
    max_running = draw(st.integers(1, 5))
    requests = [
        make_request(
            number,
            draw(st.integers(1, 12)),
            draw(st.integers(1, 12)),
            SpeculationParams(draw(st.booleans()), draw(st.sampled_from([None, 0, 1, 3]))),
            min_tokens=draw(st.integers(0, 2)),
            stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))),
        )
        for number in range(draw(st.integers(1, 7)))
    ]
    needed = max(-(-(r.max_len - 1) // kv_block_size) for r in requests)
    return {
        "kv_block_size": kv_block_size,
        "num_blocks": needed + draw(st.integers(0, 8)),
        "limits": SchedulerLimits(
            max_running, max_running + draw(st.integers(0, 12)), draw(st.integers(0, 5))
        ),
        "requests": requests,
        "arrivals": sorted(draw(st.integers(0, 10)) for _ in requests),
        "abort": draw(
            st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 12), max_size=2)
        ),
        "quality": draw(st.sampled_from([0, 1, 2])),
    }


def draft_for(plan: Plan, quality: int) -> Drafts:
    """quality 0: wrong at once; 1: right for a while; 2: all right. Some are short or missing."""
    by_session = {}
    for entry in plan.entries:
        request = entry.request
        if entry.max_drafts and (plan.step_id + request.session_id) % 4:
            token_ids = list(request.token_ids)
            for i in range(entry.max_drafts - plan.step_id % 2):
                wrong = quality == 0 or (quality == 1 and i == plan.step_id % 3)
                token_ids.append((next_token(token_ids) + wrong) % VOCAB)
            by_session[request.session_id] = Draft(tuple(token_ids[len(request.token_ids) :]))
    return Drafts(by_session)


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_every_request_gets_its_one_right_answer_and_no_block_leaks(world: dict) -> None:
    released: list[Request] = []
    limits: SchedulerLimits = world["limits"]
    scheduler = make_scheduler(world["num_blocks"], world["kv_block_size"], limits, released)
    target = FakeTarget(scheduler)
    requests: list[Request] = world["requests"]
    ends: dict[str, list[FinishReason]] = {r.request_id: [] for r in requests}
    aborted: set[Request] = set()
    for tick in range(2_000):
        for request, arrival in zip(requests, world["arrivals"], strict=True):
            if arrival == tick:
                scheduler.add(request)
        for number, when in world["abort"].items():
            if when == tick and scheduler.holds(requests[number]):
                aborted.add(requests[number])
                ends[requests[number].request_id].append(scheduler.abort(requests[number]).reason)
        if scheduler.has_work:
            plan = scheduler.plan()
            rows = sum(entry.num_tokens + entry.max_drafts for entry in plan.entries)
            assert 0 < rows <= limits.max_batch_tokens
            assert len(scheduler.running) <= limits.max_running
            for entry in plan.entries:
                covered = len(entry.request.block_table) * world["kv_block_size"]
                assert covered >= entry.start + entry.num_tokens + entry.max_drafts
                assert entry.max_drafts == 0 or entry.request.speculation.enabled
            drafts = draft_for(plan, world["quality"])
            for event in scheduler.commit(plan, drafts, target.run(plan, drafts)):
                if isinstance(event, Finished):
                    ends[event.request_id].append(event.reason)
        live = [*scheduler.running, *scheduler.waiting]
        held = [block for request in live for block in request.block_table]
        assert set(held) <= set(range(world["num_blocks"]))
        assert len(set(held)) == len(held) == world["num_blocks"] - scheduler.kv_blocks.num_free
        if not scheduler.has_work and tick > 12:
            break
    assert scheduler.kv_blocks.num_free == world["num_blocks"]
    for request in requests:
        assert len(ends[request.request_id]) == 1 == len(set(ends[request.request_id]))
        expected = plain(request)
        if request in aborted:
            assert request.token_ids == expected[: len(request.token_ids)]
        else:
            assert request.token_ids == expected
        assert request in released


def test_decoding_goes_first_and_prefill_fills_the_rest() -> None:
    scheduler = make_scheduler(64, 4, SchedulerLimits(4, 8, 2))
    target = FakeTarget(scheduler)
    scheduler.add(make_request(1, num_prompt=2))
    step(scheduler, target)
    scheduler.add(make_request(2, num_prompt=11))
    plan = scheduler.plan()
    first, second = plan.entries
    assert (first.num_tokens, first.max_drafts, first.samples) == (1, 2, True)
    assert (second.num_tokens, second.max_drafts, second.samples) == (5, 0, False)


def test_a_share_of_the_rows_for_every_decoding_request() -> None:
    scheduler = make_scheduler(64, 4, SchedulerLimits(3, 8, 7))
    target = FakeTarget(scheduler)
    for number in range(3):
        scheduler.add(make_request(number + 1, num_prompt=2, max_tokens=40))
    step(scheduler, target)
    assert [entry.max_drafts for entry in scheduler.plan().entries] == [1, 1, 1]


def test_the_last_token_needs_no_draft() -> None:
    scheduler = make_scheduler(64, 4, SchedulerLimits(1, 16, 7))
    target = FakeTarget(scheduler)
    request = make_request(1, max_tokens=4, stop_token_ids=(), min_tokens=4)
    scheduler.add(request)
    step(scheduler, target)
    [entry] = scheduler.plan().entries
    assert entry.max_drafts == 2  # 3 tokens are left: 2 drafts and the bonus


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_blocks_run_out_drafts_go_first_then_the_youngest(max_drafts: int) -> None:
    released: list[Request] = []
    scheduler = make_scheduler(5, 2, SchedulerLimits(2, 16, max_drafts), released)
    target = FakeTarget(scheduler)
    old = make_request(1, num_prompt=3, max_tokens=7, min_tokens=7)
    young = make_request(2, num_prompt=3, max_tokens=7, min_tokens=7)
    scheduler.add(old)
    scheduler.add(young)
    num_steps = 0
    while not released:
        step(scheduler, target)
        num_steps += 1
    # Five blocks hold four positions each and one more; drafts never bring that moment forward.
    assert num_steps == 3 and released == [young]
    assert young.num_computed == 0 and young.block_table == []
    while scheduler.has_work:
        step(scheduler, target)
    assert (old.token_ids, young.token_ids) == (plain(old), plain(young))
    assert scheduler.num_preemptions == 1


def test_counters_count_what_was_emitted() -> None:
    scheduler = make_scheduler(64, 4, SchedulerLimits(1, 16, 4))
    target = FakeTarget(scheduler)
    request = make_request(1, max_tokens=30)
    answer = plain(request)
    stop_id = answer[request.num_prompt + 2]
    assert stop_id not in answer[request.num_prompt : request.num_prompt + 2]
    request = make_request(1, max_tokens=30, stop_token_ids=(stop_id,))
    scheduler.add(request)
    step(scheduler, target)
    good = Drafts({1: Draft(tuple(answer[request.num_prompt + 1 :][:4]))})
    delta, finished = step(scheduler, target, good)
    assert isinstance(delta, Delta) and isinstance(finished, Finished)
    assert delta.token_ids == (answer[request.num_prompt + 1], stop_id)
    assert delta.num_accepted_drafts == 2  # both were drafts; what came after the stop is gone
    counters = finished.counters
    assert (counters.num_rounds, counters.num_drafted_rounds) == (1, 1)
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 2)
    assert counters.accepted_by_position == [1, 1]
    assert finished.reason is FinishReason.STOP_TOKEN and finished.matched_token_id == stop_id


def test_a_round_without_the_wanted_drafts_is_a_fallback_and_a_cut_one_is_not() -> None:
    scheduler = make_scheduler(64, 4, SchedulerLimits(1, 16, 4))
    target = FakeTarget(scheduler)
    request = make_request(1, max_tokens=30, min_tokens=30)
    scheduler.add(request)
    step(scheduler, target)
    step(scheduler, target)
    assert request.counters.num_fallback_rounds == 1
    step(scheduler, target, Drafts({1: Draft(())}))
    assert request.counters.num_fallback_rounds == 1
    assert (request.counters.num_rounds, request.counters.num_drafted_rounds) == (2, 0)


def test_an_aborted_request_is_gone_wherever_it_was() -> None:
    released: list[Request] = []
    scheduler = make_scheduler(64, 4, SchedulerLimits(1, 16, 4), released)
    target = FakeTarget(scheduler)
    running, waiting = make_request(1, max_tokens=30, min_tokens=30), make_request(2)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler, target)
    for request in (waiting, running):
        assert scheduler.abort(request).reason is FinishReason.ABORT
    assert not scheduler.has_work and released == [waiting, running]
    assert scheduler.kv_blocks.num_free == 64


def test_tables_stay_contiguous_while_there_is_room() -> None:
    scheduler = make_scheduler(64, 2, SchedulerLimits(8, 64, 0))
    target = FakeTarget(scheduler)
    requests = [make_request(n, max_tokens=8, min_tokens=8) for n in range(5)]
    for request in requests:
        scheduler.add(request)
    for _ in range(7):
        step(scheduler, target)
    for request in requests:
        first = request.block_table[0]
        assert request.block_table == list(range(first, first + len(request.block_table)))


def test_a_request_that_can_never_fit_is_our_own_mistake() -> None:
    scheduler = make_scheduler(2, 2, SchedulerLimits(1, 8, 0))
    with pytest.raises(AssertionError):
        scheduler.add(make_request(1, num_prompt=3, max_tokens=3))
