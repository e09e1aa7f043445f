"""drafter_client.py looking ahead: what was told early, what came instead, and what then counts."""

import threading
import time
from typing import Any

import pytest

from common.pb.v1 import drafter_pb2 as pb
from verifier_svc.drafter_client import MAX_UNANSWERED
from verifier_svc.request import Entry, Outlook, Plan, Request

NEXT = 60  # id of the anchor after the first round
DRAFTS = (61, 62, 63, 64)  # what the scripted drafter makes of it


def decide(req: Request, *token_ids: int) -> None:
    req.token_ids += token_ids
    req.num_computed = len(req.token_ids) - 1


def begun(rig: Any, *numbers: int) -> list[Request]:
    """Requests in their first round: anchor at 5, drafts behind it, whose rows are told."""
    requests = [rig.request(number) for number in numbers]
    assert set(rig.propose(*requests)[0].by_session) == set(numbers)
    rig.look_ahead(*(Outlook(req, 10) for req in requests))
    return requests


def shape(step: pb.Step) -> list[tuple[int, int, int, int]]:
    return [(e.base_len, e.num_rows, e.num_draft_tokens, e.anchor_id) for e in step.entries]


def test_a_right_guess_leaves_nothing_to_ask(rig: Any) -> None:
    fake, [req] = rig.connect(), begun(rig, 1)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    decide(req, 6, 7, NEXT)
    drafts, took = rig.propose(req)
    assert drafts.by_session[1].token_ids == DRAFTS and took < rig.timeout_s
    _, rows, guess = fake.steps
    assert rows.quiet and shape(rows) == [(5, 5, 0, 0)]
    assert rows.rows == bytes([1, 5, 1, 6, 1, 7, 1, 8, 1, 9])
    assert not guess.quiet and shape(guess) == [(8, 0, 4, NEXT)] and not guess.rows
    assert rig.counts.of == {"feature_bytes": 20, "asked_ahead.used": 1}


GUESSES = {"another anchor": (8, 59, 8), "fewer accepted": (6, NEXT, 6), "more": (10, NEXT, 8)}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("comes", ["before", "with the other"])
def test_a_wrong_guess_is_corrected_and_its_answer_dropped(
    rig: Any, guess: str, comes: str
) -> None:
    held: list[pb.DraftResponse] = []

    def answer(step: pb.Step) -> list[pb.DraftResponse]:
        if step.quiet:
            return []
        held.append(rig.proposals(step))
        if comes == "with the other" and step.step_id == 3:
            return []
        answers, held[:] = list(held), []
        return answers

    fake, [req] = rig.connect(answer), begun(rig, 1)
    start, anchor_id, base_len = GUESSES[guess]
    rig.look_ahead(Outlook(req, start, anchor_id, 4))
    if comes == "before":
        rig.eventually(lambda: rig.num_waiting == 1)
    decide(req, 6, 7, NEXT)
    assert rig.propose(req)[0].by_session[1].token_ids == DRAFTS
    guessed, asked = fake.steps[2:]
    assert shape(guessed) == [(start, 0, 4, anchor_id)]
    assert shape(asked) == [(base_len, 8 - base_len, 4, NEXT)]
    assert asked.entries[0].epoch == guessed.entries[0].epoch
    assert rig.counts.of["asked_ahead.in_vain"] == 1 and not rig.counts.of["asked_ahead.used"]
    assert rig.counts.of["stale_proposals"] == (comes != "before")
    assert not rig.counts.of["bad_proposals"]


def test_an_early_answer_may_come_before_or_during_the_wait(rig: Any) -> None:
    fake, [req] = rig.connect(), begun(rig, 1)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    rig.eventually(lambda: rig.num_waiting == 1)
    decide(req, 6, 7, NEXT)
    assert rig.propose(req)[0].by_session[1].token_ids == DRAFTS

    fake.answer = rig.silent
    rig.look_ahead(Outlook(req, 9, 70, 4))
    decide(req, 70)
    rig.eventually(lambda: len(fake.steps) == 4)
    late = threading.Timer(
        0.05, lambda: rig.on_loop(fake.context.write(rig.proposals(fake.steps[3])))
    )
    late.start()
    drafts, took = rig.propose(req)
    late.join()
    assert drafts.by_session[1].token_ids == (71, 72, 73, 74) and 0.02 < took < rig.timeout_s
    assert len(fake.steps) == 4 and rig.counts.of["asked_ahead.used"] == 2


def test_an_early_answer_that_comes_after_the_wait_is_stale(hasty: Any) -> None:
    held: list[pb.DraftResponse] = []

    def hold_third(step: pb.Step) -> list[pb.DraftResponse]:
        if step.quiet:
            return []
        held.append(hasty.proposals(step))
        if step.step_id == 3:
            return []
        answers, held[:] = list(held), []
        return answers

    fake, [req] = hasty.connect(hold_third), begun(hasty, 1)
    hasty.look_ahead(Outlook(req, 8, NEXT, 4))
    decide(req, 6, 7, NEXT)
    assert not hasty.propose(req)[0].by_session
    decide(req, 80)
    assert hasty.propose(req)[0].by_session[1].token_ids == (81, 82, 83, 84)
    assert shape(fake.steps[-1]) == [(8, 1, 4, 80)]
    assert hasty.counts.of["draft_late.timeout"] == hasty.counts.of["stale_proposals"] == 1


def test_fewer_drafts_than_asked_early_are_the_first_of_them_and_more_are_asked_anew(
    rig: Any,
) -> None:
    fake, [one, two] = rig.connect(), begun(rig, 1, 2)
    rig.look_ahead(Outlook(one, 8, NEXT, 4), Outlook(two, 8, NEXT, 1))
    decide(one, 6, 7, NEXT)
    decide(two, 6, 7, NEXT)
    plan = Plan(1, (Entry(one, 8, 1, True, 2), Entry(two, 8, 1, True, 3)))
    drafts = rig.client.propose(plan, rig.Features())
    assert drafts.by_session[1].token_ids == DRAFTS[:2]
    assert drafts.by_session[1].confidence_logits == (1.0, 1.0)
    assert drafts.by_session[2].token_ids == DRAFTS[:3]
    assert shape(fake.steps[-1]) == [(8, 0, 3, NEXT)] and fake.steps[-1].entries[0].session_id == 2


@pytest.mark.parametrize("answered", [False, True])
def test_a_request_released_while_its_guess_is_out_may_come_again(rig: Any, answered: bool) -> None:
    fake, [req, other] = rig.connect(), begun(rig, 1, 2)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    if answered:  # and read, as other requests end
        rig.eventually(lambda: rig.num_waiting == 1)
        rig.client.release(other)
    rig.client.release(req)
    rig.eventually(lambda: 1 in fake.steps[-1].close_ids)
    decide(req, 6, 7, NEXT)
    drafts, _ = rig.propose(req)  # preempted and computed again
    assert drafts.by_session[1].token_ids == DRAFTS
    assert shape(fake.steps[-1]) == [(0, 8, 4, NEXT)]
    assert fake.steps[-1].entries[0].epoch > fake.steps[2].entries[0].epoch
    assert not rig.counts.of["bad_proposals"] and not rig.counts.of["asked_ahead.used"]


def left_with_a_guess(rig: Any) -> Request:
    """The drafter of a request in its first round dies before it has answered the guess."""
    fake, [req] = rig.connect(), begun(rig, 1)
    fake.answer = rig.silent
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    rig.kill()
    rig.eventually(lambda: rig.state == "CONNECTING")
    return req


def test_another_stream_between_guess_and_ask_begins_from_row_0(rig: Any) -> None:
    req = left_with_a_guess(rig)
    decide(req, 6, 7, NEXT)
    again = rig.serve()
    rig.eventually(lambda: rig.state == "READY")
    assert not rig.client.may_look_ahead  # nothing is known of what it holds yet
    rig.look_ahead(Outlook(req, 9, 70, 4))
    assert rig.propose(req)[0].by_session[1].token_ids == DRAFTS
    (step,) = again.steps
    assert shape(step) == [(0, 8, 4, NEXT)] and rig.client.may_look_ahead


def test_a_link_lost_after_the_guess_costs_no_wait(rig: Any) -> None:
    req = left_with_a_guess(rig)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    decide(req, 6, 7, NEXT)
    drafts, took = rig.propose(req)
    assert not drafts.by_session and took < rig.timeout_s / 2


def test_a_link_lost_while_old_answers_are_read_costs_no_wait(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, [req] = rig.connect(), begun(rig, 1)
    fake.answer, link = rig.silent, rig.client._link
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    decide(req, 6, 7, NEXT)
    monkeypatch.setattr(rig.client._sync, "settle", lambda plan: link.lose())
    drafts, took = rig.propose(req)
    assert not drafts.by_session and took < rig.timeout_s / 2


def test_a_timeout_of_one_step_keeps_the_drafts_of_the_other(hasty: Any) -> None:
    fake, [one, two] = hasty.connect(), begun(hasty, 1, 2)
    hasty.look_ahead(Outlook(one, 8, NEXT, 4))
    hasty.eventually(lambda: len(fake.steps) == 3)
    fake.answer = hasty.silent
    decide(one, 6, 7, NEXT)
    decide(two, 6, 7, NEXT)
    drafts, took = hasty.propose(one, two)
    assert [*drafts.by_session] == [1] and drafts.by_session[1].token_ids == DRAFTS
    assert took >= hasty.timeout_s and hasty.counts.of["draft_late.timeout"] == 1


def test_drafts_of_a_wrong_guess_are_not_used_even_if_nothing_else_comes(hasty: Any) -> None:
    fake, [req] = hasty.connect(), begun(hasty, 1)
    hasty.look_ahead(Outlook(req, 8, 59, 4))
    hasty.eventually(lambda: hasty.num_waiting == 1)
    fake.answer = hasty.silent
    decide(req, 6, 7, NEXT)
    drafts, took = hasty.propose(req)
    assert not drafts.by_session and took >= hasty.timeout_s


def test_a_quiet_step_that_fails_begins_the_session_anew(rig: Any) -> None:
    status = pb.Proposal.Status

    def full(step: pb.Step) -> list[pb.DraftResponse]:
        """As the drafter does: a session without room is not held any more."""
        failed = {2: status.STATUS_NO_ROOM, 3: status.STATUS_UNKNOWN_SESSION}.get(step.step_id)
        if failed is None:
            return rig.good(step)
        told = [rig.drafts_for(step.entries[0], status=failed, token_ids=b"")]
        return [pb.DraftResponse(proposals=pb.Proposals(step_id=step.step_id, proposals=told))]

    fake, [req] = rig.connect(full), begun(rig, 1)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    rig.eventually(lambda: rig.num_waiting == 2)
    decide(req, 6, 7, NEXT)
    drafts, took = rig.propose(req)
    assert not drafts.by_session and took < rig.timeout_s and len(fake.steps) == 3
    rig.look_ahead(Outlook(req, 9, 70, 4))
    assert len(fake.steps) == 3  # it waits a while: not told ahead either
    rig.eventually(lambda: rig.propose(req)[0].by_session)
    assert shape(fake.steps[3]) == [(0, 8, 4, NEXT)]
    assert not rig.counts.of["bad_proposals"]


def test_a_silent_drafter_is_told_ahead_only_so_much(rig: Any) -> None:
    fake, [req] = rig.connect(), begun(rig, 1)
    fake.answer = rig.silent
    for start in range(11, 40):
        rig.look_ahead(Outlook(req, start))
    assert not rig.client.may_look_ahead
    prompt = rig.request(2, prompt=250)
    for start in range(0, 200, 10):
        prompt.num_computed = start
        rig.client.propose(Plan(1, (Entry(prompt, start, 10, False, 0),)), rig.Features())
    rig.eventually(lambda: len(fake.steps) == 1 + MAX_UNANSWERED)
    assert [step.quiet for step in fake.steps].count(True) == MAX_UNANSWERED // 2
    drafts, took = rig.propose(req)
    assert not drafts.by_session and took < rig.timeout_s
    assert rig.counts.of["draft_late.backlog"] == 1


def test_while_suspended_nothing_is_told_and_afterwards_no_row_is_missing(hasty: Any) -> None:
    fake, [req] = hasty.connect(pongs=False), begun(hasty, 1)
    fake.answer = hasty.silent
    hasty.look_ahead(Outlook(req, 9, 59, 4))
    decide(req, 6, NEXT)
    hasty.suspend(req)
    hasty.eventually(lambda: fake.pings == 1)
    num_steps = len(fake.steps)
    assert not hasty.client.may_look_ahead
    for token_id in (70, 71, 72):
        hasty.look_ahead(Outlook(req, len(req.token_ids), token_id, 4))
        decide(req, token_id)
        assert not hasty.propose(req)[0].by_session
    time.sleep(0.02)
    assert len(fake.steps) == num_steps
    fake.answer = hasty.good
    hasty.on_loop(fake.context.write(pb.DraftResponse(pong=pb.Pong(nonce=1))))
    hasty.eventually(lambda: hasty.propose(req)[0].by_session)
    held = 0
    for step in fake.steps:  # one epoch, cut back by a block at most, without gaps
        (entry,) = step.entries
        assert entry.epoch == 1 and held - 4 <= entry.base_len <= held
        held = entry.base_len + entry.num_rows
    assert held == req.num_computed == 10


def test_requests_that_end_in_a_burst_are_no_backlog(rig: Any) -> None:
    fake = rig.connect()
    for first in (1, 9, 17):
        for request in begun(rig, *range(first, first + 8)):
            rig.client.release(request)
    begun(rig, 30)
    assert rig.client.may_look_ahead and not rig.counts.of["draft_late.backlog"]
    rig.eventually(lambda: sum(len(step.close_ids) for step in fake.steps) == 24)
    assert all(step.quiet for step in fake.steps if not step.entries)


def test_a_drafter_without_time_for_a_correction_gets_no_guess(rig: Any) -> None:
    took_us = round(0.6e6 * rig.timeout_s)

    def answer(step: pb.Step) -> list[pb.DraftResponse]:
        response = rig.proposals(step)
        response.proposals.draft_us = took_us
        return [] if step.quiet else [response]

    fake, [req] = rig.connect(answer), begun(rig, 1)
    rig.look_ahead(Outlook(req, 8, NEXT, 4))
    decide(req, 6, 7, NEXT)
    took_us = 100
    assert rig.propose(req)[0].by_session[1].token_ids == DRAFTS
    assert [shape(step) for step in fake.steps[1:]] == [[(5, 5, 0, 0)], [(8, 0, 4, NEXT)]]
    rig.look_ahead(Outlook(req, 9, NEXT, 4))  # there is time again
    rig.eventually(lambda: shape(fake.steps[-1]) == [(8, 1, 4, NEXT)])
