"""The real drafter process, spoken to by the real client and by broken peers."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.contract import Contract
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from verifier_svc.request import SamplingMode

ROOT = Path(__file__).resolve().parents[3]


def test_rounds_of_several_requests_equal_each_ones_own_drafts(
    drafter: Any, pair: Any, connect: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    verifier = connect(drafter)
    requests = [verifier.request(length) for length in (1, 9, 40, 100)]
    for round_len in (1, 3, 5):
        drafts = verifier.drafts(*requests)
        for request in requests:
            draft = drafts.of(request)
            assert draft is not None and draft.token_ids == pair.expected(request)
            assert len(draft.confidence_logits) == 4
            verifier.grow(request, round_len)
    assert drafter.info().num_sessions == 4
    for request in requests:
        verifier.client.release(request)
    eventually(lambda: drafter.info().num_sessions == 0)


def test_sampled_and_coupled_drafts(drafter: Any, connect: Callable[..., Any]) -> None:
    verifier = connect(drafter)
    sampled = verifier.request(seed=5, temperature=0.8)
    coupled = verifier.request(seed=5, temperature=0.8, mode=SamplingMode.COUPLED)
    drafts = verifier.drafts(sampled, coupled)
    draft = drafts.of(sampled)
    assert draft is not None and draft.candidate_probs is not None
    assert draft.candidate_probs.shape == (4, 64)  # all of the tiny vocabulary
    one_hot = drafts.of(coupled)
    assert one_hot is not None and one_hot.candidate_probs is None
    again = verifier.drafts(sampled, coupled)
    assert [again.of(r).token_ids for r in (sampled, coupled)] == [  # type: ignore[union-attr]
        draft.token_ids,
        one_hot.token_ids,
    ]


def test_two_verifiers_share_a_drafter_and_a_leaving_one_frees_its_sessions(
    drafter: Any, pair: Any, connect: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    first, second = connect(drafter), connect(drafter)
    a, b = first.request(), second.request()
    b.session_id = a.session_id  # the same name means another session
    b.token_ids[-1] = 1
    assert first.drafts(a).by_session[a.session_id].token_ids == pair.expected(a)
    assert second.drafts(b).by_session[b.session_id].token_ids == pair.expected(b)
    assert drafter.info().num_sessions == 2
    first.stop()
    eventually(lambda: drafter.info().num_sessions == 1)
    assert second.drafts(b).by_session


def test_more_requests_than_sessions_leave_the_rest_undrafted(
    drafter: Any, connect: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    verifier = connect(drafter)
    requests = [verifier.request() for _ in range(8)]
    eventually(lambda: len(verifier.propose(*requests).by_session) == 6)
    assert len(verifier.propose(*requests).by_session) == 6
    verifier.client.release(requests[0])
    eventually(lambda: len(verifier.propose(*requests[1:]).by_session) == 6)


def hello(pair: Any, **changes: Any) -> pb.DraftRequest:
    good = {
        "protocol_version": 2,
        "contract": pb.Contract(**vars(pair.contract)),
        "feature_form": pb.FEATURE_FORM_RAW_LAYERS,
        "feature_dtype": pb.FEATURE_DTYPE_FP32,
    }
    return pb.DraftRequest(hello=pb.Hello(**{**good, **changes}))


def speak(drafter: Any, *messages: pb.DraftRequest) -> list[pb.DraftResponse]:
    """One raw stream: each message waits for the answer to the one before; reads to the end."""
    answered = threading.Semaphore(1)

    def paced() -> Iterator[pb.DraftRequest]:
        for message in messages:
            answered.acquire(timeout=5)
            yield message
        answered.acquire(timeout=5)

    replies = []
    with grpc.insecure_channel(drafter.listen) as channel:
        for reply in drafter_pb2_grpc.DrafterServiceStub(channel).Draft(paced(), timeout=20):
            replies.append(reply)
            answered.release()
    return replies


def step(step_id: int, num_rows: int, rows: bytes, **entry: Any) -> pb.DraftRequest:
    own = pb.Entry(session_id=1, epoch=1, num_rows=num_rows, **entry)
    return pb.DraftRequest(step=pb.Step(step_id=step_id, entries=[own], rows=rows))


def test_another_contract_is_refused_naming_every_field_and_both_values(
    drafter: Any, pair: Any
) -> None:
    wrong = pb.Contract(**{**vars(pair.contract), "block_size": 7, "target_layer_ids": [1]})
    with pytest.raises(grpc.RpcError) as caught:
        speak(drafter, hello(pair, contract=wrong, protocol_version=9))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = caught.value.details()
    assert "protocol_version: 2 here, 9 at the peer" in details
    assert "target_layer_ids: (0, 1) here, (1,) at the peer" in details
    assert "block_size: 4 here, 7 at the peer" in details
    assert "hidden_size" not in details


def test_a_client_with_another_contract_stays_without_drafts(
    drafter: Any, pair: Any, connect: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    verifier = connect(drafter, Contract(**{**vars(pair.contract), "mask_token_id": 3}))
    eventually(lambda: verifier.state == "REFUSED")
    assert verifier.changes == []
    assert not verifier.propose(verifier.request()).by_session


WIDTH_BYTES = 2 * 32 * 4
BROKEN: dict[str, tuple[list[pb.DraftRequest], str]] = {
    "no hello": ([pb.DraftRequest(ping=pb.Ping())], "first message is 'ping', not 'hello'"),
    "short rows": ([step(1, 2, b"\0" * 7)], "rows has 7 bytes; 2 rows of 64 fp32 are 512"),
    "too many rows": ([step(1, 33, b"\0" * 33 * WIDTH_BYTES)], "33 rows in a step, at most 32"),
    "step id": ([step(4, 0, b""), step(4, 0, b"")], "step_id 4 must be above 4"),
    "empty": ([pb.DraftRequest()], "message None after hello"),
    "mode": ([step(1, 0, b"", sampling=pb.DraftSampling(mode=9))], "mode 9 is unknown"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_protocol_ends_the_stream_and_leaves_nothing(
    drafter: Any, pair: Any, case: str, eventually: Callable[..., None]
) -> None:
    messages, said = BROKEN[case]
    greeting = [] if case == "no hello" else [hello(pair)]
    with pytest.raises(grpc.RpcError) as caught:
        speak(drafter, *greeting, *messages)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()
    eventually(lambda: drafter.info().num_sessions == 0)


def test_a_fault_of_one_session_is_its_own_answer_not_the_streams_end(
    drafter: Any, pair: Any
) -> None:
    nan = b"\xff" * WIDTH_BYTES
    replies = speak(
        drafter,
        hello(pair),
        step(1, 1, nan, num_draft_tokens=4, anchor_id=3),
        step(2, 0, b"", base_len=5, num_draft_tokens=4, anchor_id=3),
        pb.DraftRequest(ping=pb.Ping(nonce=8)),
        step(3, 0, b"", num_draft_tokens=4, anchor_id=64),
        pb.DraftRequest(ping=pb.Ping(nonce=9)),
    )
    statuses = {
        reply.proposals.step_id: [p.status for p in reply.proposals.proposals]
        for reply in replies
        if reply.HasField("proposals")
    }
    assert statuses == {
        1: [pb.Proposal.STATUS_INVALID],
        2: [pb.Proposal.STATUS_UNKNOWN_SESSION],
        3: [pb.Proposal.STATUS_INVALID],
    }
    assert [reply.pong.nonce for reply in replies if reply.HasField("pong")] == [8, 9]


def test_a_cancelled_stream_leaves_no_session_and_frees_its_place(
    drafter: Any, pair: Any, eventually: Callable[..., None]
) -> None:
    for _ in range(4):  # one more than --max-verifiers
        with grpc.insecure_channel(drafter.listen) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            requests: Any = iter([hello(pair), step(1, 1, b"\0" * WIDTH_BYTES)])
            never = threading.Event()

            def hang(requests: Any = requests, never: threading.Event = never) -> Iterator[Any]:
                yield from requests
                never.wait(10)

            call = stub.Draft(hang())
            assert next(call).HasField("welcome") and next(call).HasField("proposals")
            assert drafter.info().num_sessions == 1
            call.cancel()
            never.set()
        eventually(lambda: drafter.info().num_sessions == 0)


def test_get_info_says_what_is_loaded(drafter: Any, pair: Any) -> None:
    info = drafter.info()
    assert info.contract == pb.Contract(**vars(pair.contract)) and info.incarnation
    assert '"family": "qwen3"' in info.verdict_json and '"num_tensors": 19' in info.load_report_json
    assert info.max_sessions == 6


@pytest.mark.slow
def test_kill_restart_freeze_and_drain(
    pair: Any,
    connect: Callable[..., Any],
    start: Callable[..., Any],
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    listen, log = f"unix:{tmp_path}/d.sock", tmp_path / "log"
    process = start(listen, log)
    verifier = connect(process)
    request = verifier.request(20)
    assert verifier.drafts(request).by_session[request.session_id].token_ids
    process.end(signal.SIGKILL)
    eventually(lambda: verifier.state == "CONNECTING")
    assert not verifier.propose(request).by_session

    process = start(listen, log)
    verifier.grow(request, 3)
    drafts = verifier.drafts(request)  # everything again, from row 0
    assert drafts.by_session[request.session_id].token_ids == pair.expected(request)

    os.kill(process.process.pid, signal.SIGSTOP)
    verifier.late.of.clear()
    started = time.monotonic()
    for _ in range(20):
        verifier.grow(request, 1)
        verifier.propose(request)
    # Three steps wait in vain, then none does: counted, since a busy machine stretches any of them.
    assert verifier.late.of == {"timeout": 3}
    assert time.monotonic() - started < 20 * verifier.timeout_s
    eventually(lambda: verifier.state == "SUSPENDED")
    os.kill(process.process.pid, signal.SIGCONT)
    drafts = verifier.drafts(request)
    assert drafts.by_session[request.session_id].token_ids == pair.expected(request)

    # The verifier left on Drain and nobody waited for it: `end` has less patience than a drain.
    assert process.end(signal.SIGTERM) == 0
    eventually(lambda: verifier.state == "CONNECTING")
    assert not verifier.propose(request).by_session
    assert verifier.changes == [True, False, True, False, True, False]


def test_settings_that_cannot_work_end_with_one_line_and_2(pair: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drafter_svc", "--listen", f"unix:{tmp_path}/d.sock"]
    flags = ["--model", str(pair.target), "--target-model", str(pair.target)]
    ended = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    *_, line = ended.stderr.strip().splitlines()
    assert line.startswith("dspark-drafter: ") and "DSparkModel" in line
