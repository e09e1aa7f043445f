"""The shape of a Generate stream, against real processes: what comes, in which order, adding up."""

from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.loading.tokenizer import Tokenizer
from common.pb.v1 import verifier_pb2 as pb


def split(responses: list[pb.GenerateResponse]) -> tuple[pb.Started, list[pb.Delta], pb.Finished]:
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started"] + ["delta"] * (len(kinds) - 2) + ["finished"]
    deltas = [response.delta for response in responses[1:-1]]
    return responses[0].started, deltas, responses[-1].finished


def test_one_started_then_deltas_then_one_finished_and_it_all_adds_up(served: Any) -> None:
    request = {"text": "hello world", "sampling": {"temperature": 0.0, "seed": 7}}
    started, deltas, finished = split(served.generate(stopping={"max_tokens": 50}, **request))
    token_ids = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas) + finished.text
    tokenizer = Tokenizer(served.target)
    assert started.num_prompt_tokens == finished.num_prompt_tokens
    assert started.num_prompt_tokens == len(tokenizer.encode("hello world"))
    assert started.seed == finished.seed == 7 and started.request_id
    assert len(token_ids) == finished.num_output_tokens == 50
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert text.strip() == tokenizer.decode(token_ids).strip() != ""
    for delta in deltas:
        assert len(delta.text_ends) == len(delta.token_ids) >= 1
        assert delta.text_ends[-1] == len(delta.text)
        assert delta.num_accepted_drafts <= len(delta.token_ids)
    stats = finished.speculation
    assert stats.num_accepted_tokens > 0, "the good drafter was not used"
    assert sum(delta.num_accepted_drafts for delta in deltas) == stats.num_accepted_tokens
    assert sum(stats.accepted_by_position) == stats.num_accepted_tokens
    assert stats.num_rounds == len(deltas) - 1, "the first token comes from prefill"
    times = finished.timings
    assert times.prefill_us > 0 and times.decode_us > 0 and times.mean_round.forward_us > 0
    parts = MessageToDict(times.mean_round)
    assert sum(parts.values()) - parts.get("drafterUs", 0) <= times.decode_us


def test_drafting_changes_nothing_but_the_number_of_rounds(served: Any) -> None:
    def ids(**speculation: Any) -> tuple[list[int], pb.SpeculationStats]:
        _, deltas, finished = split(
            served.generate(stopping={"max_tokens": 60}, speculation=speculation)
        )
        return [t for delta in deltas for t in delta.token_ids], finished.speculation

    drafted, stats = ids()
    plain, none = ids(enabled=False)
    capped, two = ids(max_draft_tokens=2)
    assert drafted == plain == capped
    assert stats.num_drafted_rounds > 0 and none.num_draft_tokens == 0
    assert none.num_rounds > two.num_rounds > stats.num_rounds
    assert len(two.accepted_by_position) <= 2


def test_token_ids_and_text_are_the_same_prompt(served: Any) -> None:
    ids = Tokenizer(served.target).encode("some text 42")
    by_text = split(served.generate(text="some text 42", stopping={"max_tokens": 9}))
    by_ids = split(served.generate(token_ids={"ids": ids}, stopping={"max_tokens": 9}))
    assert [d.token_ids for d in by_text[1]] == [d.token_ids for d in by_ids[1]]


def test_a_long_text_is_tokenised_beside_the_loop(served: Any) -> None:
    text = "abc def " * 600
    started, _, finished = split(served.generate(text=text, stopping={"max_tokens": 2}))
    assert started.num_prompt_tokens == len(Tokenizer(served.target).encode(text)) > 4000
    assert finished.num_output_tokens == 2


def test_the_request_id_comes_back_in_metadata_and_started(served: Any, make_ask: Any) -> None:
    call = served.stub.Generate(make_ask(request_id="mine-1", stopping={"max_tokens": 2}))
    assert dict(call.initial_metadata())["x-request-id"] == "mine-1"
    assert split(list(call))[0].request_id == "mine-1"
    made = served.stub.Generate(make_ask(stopping={"max_tokens": 2}))
    name = dict(made.initial_metadata())["x-request-id"]
    assert len(name) == 32 and split(list(made))[0].request_id == name


def test_a_seed_is_drawn_and_returned_and_repeats_the_text(served: Any) -> None:
    first = split(served.generate(sampling={"temperature": 1.0}, stopping={"max_tokens": 20}))
    again = split(
        served.generate(
            sampling={"temperature": 1.0, "seed": first[0].seed, "mode": pb.SAMPLING_MODE_COUPLED},
            stopping={"max_tokens": 20},
        )
    )
    third = split(
        served.generate(
            sampling={"temperature": 1.0, "seed": first[0].seed, "mode": pb.SAMPLING_MODE_COUPLED},
            stopping={"max_tokens": 20},
            speculation={"enabled": False},
        )
    )
    ids = [[t for d in answer[1] for t in d.token_ids] for answer in (again, third)]
    assert first[0].seed != 0 and ids[0] == ids[1]


def test_logprobs_come_one_per_token(served: Any) -> None:
    _, deltas, _ = split(served.generate(logprobs=3, stopping={"max_tokens": 12}))
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            assert entry.logprob <= 0 and len(entry.top_ids) == len(entry.top_logprobs) == 3
            assert entry.top_ids[0] == token, "greedy takes the likeliest"
            assert entry.top_logprobs[0] == pytest.approx(entry.logprob)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text(served: Any, include: bool) -> None:
    _, deltas, finished = split(served.generate(stopping={"max_tokens": 40}))
    whole = "".join(d.text for d in deltas) + finished.text
    stop = whole[10:13]
    stopping = {"max_tokens": 40, "stop": [stop], "include_stop_str": include}
    _, deltas, finished = split(served.generate(stopping=stopping))
    text = "".join(d.text for d in deltas) + finished.text
    assert finished.reason == pb.FINISH_REASON_STOP_STRING and finished.matched_stop == stop
    assert text == whole[: whole.index(stop) + (len(stop) if include else 0)]


def test_eos_and_stop_ids_end_a_stream(served: Any) -> None:
    _, deltas, _ = split(served.generate(stopping={"max_tokens": 30}))
    token = [t for d in deltas for t in d.token_ids][17]
    _, _, finished = split(served.generate(stopping={"stop_token_ids": [token]}))
    assert finished.reason == pb.FINISH_REASON_STOP_TOKEN and finished.matched_token_id == token
    eos = served.info().eos_token_ids[0]
    bias = {"temperature": 0.0, "logit_bias": {eos: 100.0}}
    _, _, ended = split(served.generate(sampling=bias, stopping={"min_tokens": 5}))
    assert ended.reason == pb.FINISH_REASON_EOS and ended.num_output_tokens == 6
    _, _, full = split(
        served.generate(sampling=bias, stopping={"max_tokens": 8, "ignore_eos": True})
    )
    assert full.reason == pb.FINISH_REASON_MAX_TOKENS


def test_a_context_that_fills_up_says_so(served: Any) -> None:
    ids = [1, 2, 3] * ((served.max_len - 30) // 3)
    _, _, finished = split(served.generate(token_ids={"ids": ids}, stopping={"ignore_eos": True}))
    assert finished.reason == pb.FINISH_REASON_CONTEXT_FULL
    assert finished.num_prompt_tokens + finished.num_output_tokens == served.max_len


def test_info_says_what_is_loaded(served: Any) -> None:
    info = served.info()
    assert info.model == str(served.target)
    assert info.max_context_len == served.max_len and info.vocab_size == 64
    assert list(info.eos_token_ids) == [63]
    assert '"method": "dspark"' in info.plan_json
    assert '"num_tensors"' in info.load_report_json
    assert info.drafter.state == pb.DrafterStatus.STATE_READY
    assert info.drafter.address == served.drafter.listen and info.drafter.incarnation > 0


def test_reflection_describes_the_service(served: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    name = "dspark.v1.VerifierService"
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
    (answer,) = list(stub.ServerReflectionInfo(iter([request]), timeout=5))
    assert b"GenerateRequest" in answer.file_descriptor_response.file_descriptor_proto[0]
    with pytest.raises(grpc.RpcError) as unknown:
        served.channel.unary_unary("/dspark.v1.VerifierService/Nothing")(b"", timeout=5)
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
