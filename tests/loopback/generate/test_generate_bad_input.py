"""Requests that can never work: the status, a message that names the field, and nothing leaked."""

from typing import Any

import grpc
import pytest

from common.pb.v1 import verifier_pb2 as pb

NAN, INF = float("nan"), float("inf")

BAD = {
    "no prompt at all": (lambda: pb.GenerateRequest(), ["prompt is empty"]),
    "empty text": (lambda: pb.GenerateRequest(text=""), ["prompt is empty"]),
    "empty ids": (lambda: pb.GenerateRequest(token_ids={}), ["prompt is empty"]),
    "prompt as long as the context": (
        lambda: pb.GenerateRequest(token_ids={"ids": [1] * 8192}),
        ["8192 tokens long", "at most 8191"],
    ),
    "id outside the vocabulary": (
        lambda: pb.GenerateRequest(token_ids={"ids": [1, 64]}),
        ["prompt.token_ids[1] is 64", "0 to 63"],
    ),
    "id far outside": (
        lambda: pb.GenerateRequest(token_ids={"ids": [2**32 - 1]}),
        ["prompt.token_ids[0] is 4294967295"],
    ),
    "control characters in the id": (
        lambda: pb.GenerateRequest(request_id="a\nb", text="a"),
        ["request_id", "printable ASCII"],
    ),
    "endless id": (lambda: pb.GenerateRequest(request_id="x" * 300, text="a"), ["request_id"]),
    "unknown mode": (lambda: sampled(mode=9), ["sampling.mode is 9", "SAMPLING_MODE_COUPLED"]),
    "negative temperature": (lambda: sampled(temperature=-1), ["sampling.temperature is -1"]),
    "NaN temperature": (lambda: sampled(temperature=NAN), ["sampling.temperature is nan"]),
    "infinite temperature": (lambda: sampled(temperature=INF), ["sampling.temperature is inf"]),
    "top_p 0": (lambda: sampled(top_p=0), ["sampling.top_p is 0", "above 0"]),
    "top_p above 1": (lambda: sampled(top_p=1.5), ["sampling.top_p is 1.5"]),
    "min_p below 0": (lambda: sampled(min_p=-0.1), ["sampling.min_p"]),
    "repetition 0": (lambda: sampled(repetition_penalty=0), ["sampling.repetition_penalty is 0"]),
    "frequency 3": (lambda: sampled(frequency_penalty=3), ["sampling.frequency_penalty is 3"]),
    "presence NaN": (lambda: sampled(presence_penalty=NAN), ["sampling.presence_penalty is nan"]),
    "bias of an unknown id": (lambda: sampled(logit_bias={99: 1.0}), ["sampling.logit_bias", "99"]),
    "huge bias": (lambda: sampled(logit_bias={1: 101.0}), ["sampling.logit_bias[1] is 101"]),
    "logprobs 21": (lambda: pb.GenerateRequest(text="a", logprobs=21), ["logprobs is 21"]),
    "max_tokens 0": (lambda: stopped(max_tokens=0), ["stopping.max_tokens is 0"]),
    "min above max": (lambda: stopped(min_tokens=5, max_tokens=4), ["min_tokens is 5", "4"]),
    "empty stop": (lambda: stopped(stop=["a", ""]), ["stopping.stop[1]"]),
    "long stop": (lambda: stopped(stop=["a" * 257]), ["stopping.stop[0]", "257"]),
    "many stops": (lambda: stopped(stop=["a"] * 17), ["stopping.stop", "17"]),
    "unknown stop id": (lambda: stopped(stop_token_ids=[70]), ["stop_token_ids[0] is 70"]),
    "stops that contradict min_tokens": (
        lambda: stopped(min_tokens=2, max_tokens=9, stop_token_ids=range(64)),
        ["every token of the vocabulary", "min_tokens"],
    ),
    "survival above 1": (
        lambda: pb.GenerateRequest(text="a", speculation={"min_survival": 1.5}),
        ["speculation.min_survival is 1.5"],
    ),
}


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=sampling)


def stopped(**stopping: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", stopping=stopping)


@pytest.mark.parametrize("case", BAD)
def test_it_is_refused_with_its_name(served: Any, case: str) -> None:
    make, fragments = BAD[case]
    with pytest.raises(grpc.RpcError) as caught:
        list(served.stub.Generate(make(), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    for fragment in fragments:
        assert fragment in caught.value.details()


def test_a_request_above_the_message_limit_is_refused_by_the_transport(served: Any) -> None:
    request = pb.GenerateRequest(text="a" * (5 << 20))
    with pytest.raises(grpc.RpcError) as caught:
        list(served.stub.Generate(request, timeout=10))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message_are_refused(served: Any) -> None:
    call = served.channel.unary_stream("/dspark.v1.VerifierService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff\xff", timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in caught.value.details()


def test_good_requests_still_work_after_all_that(served: Any) -> None:
    assert served.generate(stopping={"max_tokens": 3})[-1].finished.num_output_tokens == 3
