"""drafter_client.py against a scripted drafter: late, dead, restarted, frozen, lying, full."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from common.pb.v1 import drafter_pb2 as pb
from verifier_svc.drafter_client import MAX_UNANSWERED
from verifier_svc.request import Entry, Plan, SamplingMode, SamplingParams


def test_a_round_carries_rows_up_and_drafts_down(rig: Any) -> None:
    fake, req = rig.connect(), rig.request(7)
    drafts, _ = rig.propose(req)
    assert drafts.by_session[7].token_ids == (6, 7, 8, 9)
    assert drafts.by_session[7].confidence_logits == (1.0,) * 4
    (entry,) = fake.steps[0].entries
    assert (entry.base_len, entry.num_rows, entry.num_draft_tokens) == (0, 5, 4)
    assert fake.steps[0].rows == b"\x07\x00\x07\x01\x07\x02\x07\x03\x07\x04"
    assert not entry.HasField("sampling")
    req.token_ids += [6, 7, 8]
    req.num_computed = 8
    rig.propose(req)
    assert fake.steps[1].rows == b"\x07\x05\x07\x06\x07\x07"
    assert fake.hellos[0].contract == pb.Contract(**vars(rig.CONTRACT))
    assert fake.hellos[0].feature_form == pb.FEATURE_FORM_RAW_LAYERS
    assert rig.counts.of == {"feature_bytes": 16}
    assert rig.changes == [True]


def test_a_finished_request_is_closed_without_waiting_for_another_step(rig: Any) -> None:
    fake, req = rig.connect(), rig.request()
    rig.propose(req)
    rig.client.release(req)
    rig.eventually(lambda: len(fake.steps) == 2)
    assert list(fake.steps[1].close_ids) == [1] and not fake.steps[1].entries


def test_sampling_wishes_reach_the_drafter(rig: Any) -> None:
    fake = rig.connect()
    wishes = [
        SamplingParams(temperature=0.5, seed=2**63 + 1, mode=SamplingMode.COUPLED),
        SamplingParams(temperature=0.75, seed=9),
        SamplingParams(temperature=0.75, seed=9),
        SamplingParams(temperature=0.75, seed=10),
    ]
    rig.propose(*(rig.request(i, sampling=wish) for i, wish in enumerate(wishes)))
    coupled, sampled, same, other = (entry.sampling for entry in fake.steps[0].entries)
    assert (coupled.mode, coupled.temperature, coupled.seed) == (3, 0.5, 2**63 + 1)
    assert (sampled.mode, sampled.temperature) == (2, 0.75)
    # A drafter that knew the seed could foresee which drafts are accepted.
    assert sampled.seed == same.seed != 9
    assert sampled.seed != other.seed


def test_without_a_drafter_nothing_waits_and_one_that_comes_is_used(rig: Any) -> None:
    rig.on_loop(rig.client.start())
    drafts, took = rig.propose(rig.request())
    assert not drafts.by_session and took < rig.timeout_s
    rig.serve()
    rig.eventually(lambda: rig.propose(rig.request())[0].by_session)


def test_a_late_step_waits_no_longer_than_allowed_and_its_answer_is_dropped(hasty: Any) -> None:
    held: list[pb.Step] = []

    def hold_first(step: pb.Step) -> list[pb.DraftResponse]:
        held.append(step)
        return [] if len(held) == 1 else [hasty.proposals(held[0]), hasty.proposals(step)]

    hasty.connect(hold_first)
    drafts, took = hasty.propose(hasty.request())
    assert not drafts.by_session
    assert hasty.timeout_s <= took < hasty.timeout_s + hasty.SLACK_S
    drafts, took = hasty.propose(hasty.request())
    assert drafts.by_session[1].token_ids == (6, 7, 8, 9) and took < hasty.timeout_s
    assert hasty.counts.of["draft_late.timeout"] == 1
    assert hasty.counts.of["stale_proposals"] == 1


def test_a_slow_drafter_is_suspended_and_its_pong_brings_it_back(hasty: Any) -> None:
    fake, req = hasty.connect(hasty.silent, pongs=False), hasty.request()
    hasty.suspend(req)
    num_steps = len(fake.steps)
    drafts, took = hasty.propose(req)
    assert not drafts.by_session and took < hasty.timeout_s
    hasty.eventually(lambda: fake.pings == 1)
    hasty.propose(req)
    assert len(fake.steps) == num_steps  # nothing is sent while suspended
    hasty.client.release(req)
    assert hasty.state == "SUSPENDED"
    fake.answer = hasty.good
    assert fake.context is not None
    hasty.on_loop(fake.context.write(pb.DraftResponse(pong=pb.Pong(nonce=1))))
    hasty.eventually(lambda: hasty.propose(req)[0].by_session)
    assert hasty.state == "READY" and hasty.changes == [True, False, True]
    assert list(fake.steps[num_steps].close_ids) == [1]  # what could not be said before


def test_a_frozen_drafter_stalls_nobody_and_thaws(hasty: Any) -> None:
    fake, req = hasty.connect(), hasty.request()
    hasty.propose(req)

    async def freeze() -> None:
        fake.reads.clear()

    async def thaw() -> None:
        fake.reads.set()

    hasty.on_loop(freeze())
    started = time.monotonic()
    for _ in range(50):
        hasty.propose(req)
    assert time.monotonic() - started < 3 * (hasty.timeout_s + hasty.SLACK_S)
    hasty.on_loop(thaw())
    hasty.eventually(lambda: hasty.propose(req)[0].by_session)


def test_a_drafter_frozen_for_good_does_not_hold_up_the_end(hasty: Any) -> None:
    fake = hasty.connect()

    async def freeze() -> None:
        fake.reads.clear()

    hasty.on_loop(freeze())
    hasty.propose(hasty.request())
    started = time.monotonic()
    hasty.on_loop(hasty.client.stop())
    assert time.monotonic() - started < 2.0


def test_death_in_the_middle_of_a_wait_ends_the_wait(rig: Any) -> None:
    rig.connect(rig.silent)
    killer = threading.Timer(0.02, rig.kill)
    killer.start()
    drafts, took = rig.propose(rig.request())
    killer.join()
    assert not drafts.by_session and took < rig.timeout_s
    assert rig.counts.of["draft_late.lost"] == 1


def test_a_restarted_drafter_gets_everything_again_from_row_0(rig: Any) -> None:
    fake, req = rig.connect(), rig.request()
    rig.propose(req)
    rig.kill()
    rig.eventually(lambda: rig.state == "CONNECTING")
    again = rig.serve()
    rig.eventually(lambda: rig.propose(req)[0].by_session)
    (before,), (after,) = fake.steps[0].entries, again.steps[0].entries
    assert after.base_len == 0 and after.num_rows == 5 and after.epoch > before.epoch
    assert rig.changes == [True, False, True]


def test_the_path_is_woken_before_the_next_step_is_due(waiting: Any) -> None:
    fake, req = waiting.connect(), waiting.request()
    waiting.propose(req)
    assert not fake.pings
    time.sleep(0.2)  # the target runs
    waiting.propose(req)
    assert not fake.pings  # no pause was known before
    waiting.eventually(lambda: fake.pings == 1, 0.5)
    time.sleep(0.1)
    waiting.propose(req)
    assert fake.pings == 1 and waiting.changes == [True]  # its Pong means nothing else


def test_the_path_is_not_woken_again_before_the_last_ping_is_answered(waiting: Any) -> None:
    fake, req = waiting.connect(pongs=False), waiting.request()
    for _ in range(4):
        waiting.propose(req)
        time.sleep(0.03)
    assert fake.pings == 1


def test_another_protocol_version_is_refused_saying_both(rig: Any) -> None:
    fake = rig.serve()
    fake.welcome["protocol_version"] = 7
    rig.on_loop(rig.client.start())
    rig.eventually(lambda: rig.state == "REFUSED")
    detail = rig.client.status().detail
    assert "protocol_version 7, this verifier 2; run both" in detail
    assert not rig.propose(rig.request())[0].by_session and not fake.steps
    assert rig.counts.of["contract_mismatch"] and rig.changes == []
    rig.kill()
    rig.serve()
    rig.eventually(lambda: rig.state == "READY")  # the right one took its place


def test_a_drafter_of_another_contract_is_never_used(rig: Any) -> None:
    fake = rig.serve(refusal="block_size: 7 here, 4 at the peer")
    rig.on_loop(rig.client.start())
    rig.eventually(lambda: len(fake.hellos) >= 2)
    drafts, took = rig.propose(rig.request())
    assert not drafts.by_session and took < rig.timeout_s and not fake.steps
    assert rig.counts.of["contract_mismatch"] >= 1 and rig.changes == []
    assert rig.state == "REFUSED" and "block_size: 7 here" in rig.client.status().detail
    rig.kill()
    rig.serve()
    rig.eventually(lambda: rig.state == "READY")  # the right one took its place


LIES: dict[str, dict[str, Any]] = {
    "token outside": {"token_ids": np.array([100], "<i4").tobytes()},
    "too many": {"token_ids": np.arange(5, dtype="<i4").tobytes(), "confidence_logits": b""},
    "another epoch": {"epoch": 99},
    "another base": {"base_len": 4},
    "another session": {"session_id": 55},
    "unasked candidates": {"top_k": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_its_own_draft_only(rig: Any, lie: str) -> None:
    def lying(step: pb.Step) -> list[pb.DraftResponse]:
        first, *others = step.entries
        told = [rig.drafts_for(first, **LIES[lie]), *map(rig.drafts_for, others)]
        return [pb.DraftResponse(proposals=pb.Proposals(step_id=step.step_id, proposals=told))]

    rig.connect(lying)
    drafts, took = rig.propose(rig.request(1), rig.request(2))
    assert list(drafts.by_session) == [2] and took < rig.timeout_s
    assert rig.counts.of["bad_proposals"] == 1


def test_an_answer_to_no_question_is_dropped(rig: Any) -> None:
    def chatty(step: pb.Step) -> list[pb.DraftResponse]:
        other = pb.Step(step_id=step.step_id + 40, entries=step.entries)
        return [rig.proposals(other), rig.proposals(step), rig.proposals(step)]

    rig.connect(chatty)
    assert rig.propose(rig.request())[0].by_session
    rig.eventually(lambda: rig.client._link.inbox.qsize() == 1)  # type: ignore[union-attr]
    assert rig.propose(rig.request())[0].by_session
    assert rig.counts.of["bad_proposals"] == 3


@pytest.mark.parametrize("status", ["STATUS_UNKNOWN_SESSION", "STATUS_BASE_MISMATCH"])
def test_a_lost_session_is_sent_again_in_the_next_step(rig: Any, status: str) -> None:
    def forgetful(step: pb.Step) -> list[pb.DraftResponse]:
        if step.entries[0].base_len:
            return [rig.proposals(step, status=pb.Proposal.Status.Value(status), token_ids=b"")]
        return rig.good(step)

    fake, req = rig.connect(forgetful), rig.request()
    assert rig.propose(req)[0].by_session
    assert not rig.propose(req)[0].by_session
    assert rig.propose(req)[0].by_session
    assert [step.entries[0].base_len for step in fake.steps] == [0, 5, 0]
    assert fake.steps[2].entries[0].epoch > fake.steps[1].entries[0].epoch


@pytest.mark.parametrize("status", ["STATUS_NO_ROOM", "STATUS_INVALID"])
def test_a_session_without_room_goes_undrafted_for_a_while(rig: Any, status: str) -> None:
    def full(step: pb.Step) -> list[pb.DraftResponse]:
        return [rig.proposals(step, status=pb.Proposal.Status.Value(status), token_ids=b"")]

    fake, req = rig.connect(full), rig.request()
    rig.propose(req)
    for _ in range(10):
        assert not rig.propose(req)[0].by_session
    assert len(fake.steps) == 1
    fake.answer = rig.good
    rig.eventually(lambda: rig.propose(req)[0].by_session, 2.0)


def test_an_evicted_session_waits_and_starts_from_row_0(rig: Any) -> None:
    def evicting(step: pb.Step) -> list[pb.DraftResponse]:
        notice = pb.DraftResponse(evicted=pb.Evicted(session_ids=[1, 77]))
        return [notice, *rig.good(step)]

    fake, req = rig.connect(evicting), rig.request()
    rig.propose(req)
    fake.answer = rig.good
    assert not rig.propose(req)[0].by_session
    rig.eventually(lambda: rig.propose(req)[0].by_session, 2.0)
    assert fake.steps[1].entries[0].base_len == 0


def test_a_draining_drafter_is_left_politely(rig: Any) -> None:
    fake = rig.connect(lambda step: [pb.DraftResponse(drain=pb.Drain())])
    drafts, took = rig.propose(rig.request())
    assert not drafts.by_session and took < rig.timeout_s
    rig.eventually(lambda: fake.byes == 1 and fake.num_open <= 1)


def test_a_flood_while_the_engine_sleeps_ends_the_stream(rig: Any) -> None:
    flood = [pb.DraftResponse(evicted=pb.Evicted(session_ids=[1]))] * 5000
    fake = rig.connect(lambda step: flood)
    link = rig.client._connector.link
    assert link is not None
    prompt = rig.request()
    prompt.num_computed = 2
    # Rows only: `propose` waits for nothing, so nobody reads the inbox.
    rig.client.propose(Plan(1, (Entry(prompt, 2, 3, False, 0),)), rig.Features())
    rig.eventually(lambda: link.lost)
    assert len(fake.steps) == 1


class _Endless:
    """The inbox under a drafter that sends faster than anybody reads."""

    def __init__(self, limit_s: float) -> None:
        self._until = time.monotonic() + limit_s

    def qsize(self) -> int:
        return 100

    def get_nowait(self) -> pb.DraftResponse:
        return self.get(0)

    def get(self, timeout: float) -> pb.DraftResponse:
        assert time.monotonic() < self._until, "the flood held the engine up"
        return pb.DraftResponse(evicted=pb.Evicted(session_ids=[9]))


def test_a_flood_while_the_engine_waits_does_not_stretch_the_wait(hasty: Any) -> None:
    hasty.connect(hasty.silent)
    link = hasty.client._connector.link
    assert link is not None
    link.inbox = _Endless(hasty.timeout_s + hasty.SLACK_S)
    assert not hasty.propose(hasty.request())[0].by_session
    assert hasty.counts.of["draft_late.timeout"] == 1


def test_a_pong_that_nobody_asked_for_ends_no_suspension(hasty: Any) -> None:
    fake, req = hasty.connect(hasty.silent, pongs=False), hasty.request()
    hasty.suspend(req)
    hasty.eventually(lambda: fake.pings == 1)
    assert fake.context is not None
    for nonce in (0, 2, 77):
        hasty.on_loop(fake.context.write(pb.DraftResponse(pong=pb.Pong(nonce=nonce))))
    time.sleep(0.05)
    num_steps = len(fake.steps)
    hasty.propose(req)
    assert hasty.state == "SUSPENDED" and len(fake.steps) == num_steps


def test_a_drafter_that_closes_every_stream_is_tried_ever_more_rarely(rig: Any) -> None:
    fake = rig.serve(closes=True)
    rig.on_loop(rig.client.start())
    time.sleep(1.2)
    assert 2 <= len(fake.hellos) <= 5  # after 0.1, 0.2, 0.4, 0.8 s


def test_a_backlog_of_unanswered_steps_stops_the_sending(rig: Any) -> None:
    fake, req = rig.connect(rig.silent), rig.request(prompt=250)
    prompt = Plan(1, (Entry(req, 200, 50, False, 0),))
    req.num_computed = 200
    for start in range(0, 200, 10):
        rig.client.propose(Plan(1, (Entry(req, start, 10, False, 0),)), rig.Features())
    rig.eventually(lambda: len(fake.steps) == MAX_UNANSWERED)
    rig.client.propose(prompt, rig.Features())
    assert len(fake.steps) == MAX_UNANSWERED and rig.state == "READY"
    rig.propose(rig.request(2))
    assert rig.counts.of["draft_late.backlog"] == 1


def test_stop_says_bye_and_leaves_no_stream(rig: Any) -> None:
    fake = rig.connect()
    rig.propose(rig.request())
    rig.on_loop(rig.client.stop())
    rig.eventually(lambda: fake.byes == 1 and fake.num_open == 0)
