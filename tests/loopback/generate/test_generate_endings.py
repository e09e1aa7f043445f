"""Every way in which a stream can end early: the status, the message, and nothing left behind."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common.pb.v1 import verifier_pb2 as pb
from common.pb.v1 import verifier_pb2_grpc

# A client whose transport takes as little as gRPC lets it: back-pressure comes early.
SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


def under_way(call: Iterator[pb.GenerateResponse], num_deltas: int = 3) -> None:
    """Reads until the stream runs."""
    for _ in range(num_deltas + 1):
        next(call)


@pytest.mark.parametrize("when", ["in the queue", "before the first read", "mid-stream"])
def test_a_cancelled_call_frees_both_sides(served: Any, make_ask: Any, when: str) -> None:
    held = []
    if when == "in the queue":
        held = [served.stub.Generate(make_ask(endless=True)) for _ in range(served.max_running)]
        for call in held:
            under_way(call)
    cancelled = served.stub.Generate(make_ask(endless=True))
    if when == "mid-stream":
        under_way(cancelled)
        assert served.info().num_running == 1
    elif when == "in the queue":
        served.eventually(lambda: served.info().num_waiting == 1)
    cancelled.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        list(cancelled)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    served.eventually(lambda: served.info().num_waiting == 0)
    for call in held:
        call.cancel()
    served.assert_empty()


def test_a_deadline_ends_the_request(served: Any, make_ask: Any) -> None:
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(served.stub.Generate(make_ask(endless=True), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 3


def test_a_client_that_disconnects_frees_its_request(served: Any, make_ask: Any) -> None:
    with grpc.insecure_channel(served.verifier.listen, options=(("x", 1),)) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(make_ask(endless=True))
        under_way(call)
        assert served.info().num_running == 1
    served.assert_empty()


def test_a_client_that_stops_reading_is_cut_and_hurts_nobody(served: Any, make_ask: Any) -> None:
    options = (*SMALL_WINDOWS, ("x", 2))
    with grpc.insecure_channel(served.verifier.listen, options=options) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        slow = stub.Generate(make_ask(endless=True, logprobs=20, request_id="slow"))
        under_way(slow)
        neighbour = served.generate(stopping={"max_tokens": 200, "ignore_eos": True})
        assert neighbour[-1].finished.reason == pb.FINISH_REASON_MAX_TOKENS
        served.eventually(lambda: served.info().num_running == 0, seconds=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(slow)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "'slow' was ended: the client left" in caught.value.details()


def test_a_live_request_id_is_refused_and_free_again_afterwards(served: Any, make_ask: Any) -> None:
    call = served.stub.Generate(make_ask(endless=True, request_id="twin"))
    under_way(call)
    error = served.refused(request_id="twin")
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'twin' is live" in error.details()
    assert next(call).delta.token_ids, "the first one goes on"
    call.cancel()
    # Its client is gone: the id is free as soon as the engine has let go, without a retry.
    again = served.generate(request_id="twin", stopping={"max_tokens": 3})
    assert again[-1].finished.num_output_tokens == 3


def test_a_full_queue_says_when_to_come_back(served: Any, make_ask: Any) -> None:
    room = served.max_running + served.max_waiting
    calls = [served.stub.Generate(make_ask(endless=True)) for _ in range(room)]
    for call in calls:
        call.initial_metadata()  # admitted
    error = served.refused()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{room} requests are running or queued" in error.details()
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0
    served.eventually(lambda: served.info().num_running == served.max_running)
    assert served.info().num_waiting == served.max_waiting
    for call in calls:
        call.cancel()
    served.assert_empty()
    assert served.generate(stopping={"max_tokens": 1})[-1].HasField("finished")


def test_abort_ends_the_named_requests_with_a_final_message(served: Any, make_ask: Any) -> None:
    calls = {name: served.stub.Generate(make_ask(endless=True, request_id=name)) for name in "abc"}
    for call in calls.values():
        under_way(call)
    answer = served.stub.Abort(pb.AbortRequest(request_ids=["a", "c", "unknown"]), timeout=5)
    assert list(answer.aborted_ids) == ["a", "c"]
    for name in "ac":
        finished = list(calls[name])[-1].finished
        assert finished.reason == pb.FINISH_REASON_ABORT and finished.num_output_tokens > 0
    assert next(calls["b"]).delta.token_ids
    again = served.stub.Abort(pb.AbortRequest(request_ids=["a"]), timeout=5)
    assert not again.aborted_ids
    calls["b"].cancel()


def test_many_clients_that_come_and_go_leave_nothing(served: Any, make_ask: Any) -> None:
    """Every third one cancels at some moment, admitted or not, next to streams that must finish."""

    def once(number: int) -> str:
        call = served.stub.Generate(make_ask(stopping={"max_tokens": 40, "ignore_eos": True}))
        try:
            if number % 3 == 0:
                time.sleep(number * 0.001)
                call.cancel()
            num_tokens = sum(len(response.delta.token_ids) for response in call)
            return "finished" if num_tokens == 40 else f"{num_tokens} tokens"
        except grpc.RpcError as error:
            return str(error.code().name)

    def client(number: int) -> str:
        # A cancelled request keeps its place until the engine's next step: the queue may be full.
        while (end := once(number)) == "RESOURCE_EXHAUSTED":
            time.sleep(0.01)
        return end

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(client, range(48)))
    assert set(ends) == {"finished", "CANCELLED"}, ends
    assert [end for number, end in enumerate(ends) if number % 3] == ["finished"] * 32
