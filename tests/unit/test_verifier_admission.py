"""Admission: what it refuses, with which words, and what it fills in."""

import math

import pytest

from common.errors import InvalidRequest
from verifier_svc.admission import Admission, Ask, Limits
from verifier_svc.request import SamplingMode

LIMITS = Limits(vocab_size=100, max_context_len=32, eos_token_ids=frozenset({99}))


def admit(limits: Limits = LIMITS, **asked: object):
    asked.setdefault("prompt_ids", [1, 2, 3])
    asked.setdefault("request_id", "r")
    return Admission(limits).admit(Ask(**asked))  # type: ignore[arg-type]


REFUSED = [
    ("prompt", "empty", {"prompt_ids": []}),
    ("prompt", "32 tokens", {"prompt_ids": [1] * 32}),
    ("prompt.token_ids[1]", "100", {"prompt_ids": [1, 100]}),
    ("prompt.token_ids[0]", "-1", {"prompt_ids": [-1]}),
    ("request_id", "0 characters", {"request_id": ""}),
    ("request_id", "257 characters", {"request_id": "x" * 257}),
    ("sampling.temperature", "-0.5", {"temperature": -0.5}),
    ("sampling.temperature", "nan", {"temperature": math.nan}),
    ("sampling.temperature", "inf", {"temperature": math.inf}),
    ("sampling.top_k", "-1", {"top_k": -1}),
    ("sampling.top_p", "0.0", {"top_p": 0.0}),
    ("sampling.top_p", "1.5", {"top_p": 1.5}),
    ("sampling.top_p", "nan", {"top_p": math.nan}),
    ("sampling.min_p", "-0.1", {"min_p": -0.1}),
    ("sampling.min_p", "1.1", {"min_p": 1.1}),
    ("sampling.repetition_penalty", "0.0", {"repetition_penalty": 0.0}),
    ("sampling.repetition_penalty", "inf", {"repetition_penalty": math.inf}),
    ("sampling.repetition_penalty", "1e-45", {"repetition_penalty": 1e-45}),
    ("sampling.repetition_penalty", "3e+38", {"repetition_penalty": 3e38}),
    ("sampling.frequency_penalty", "2.5", {"frequency_penalty": 2.5}),
    ("sampling.presence_penalty", "-2.5", {"presence_penalty": -2.5}),
    ("sampling.logit_bias[7]", "101.0", {"logit_bias": {7: 101.0}}),
    ("sampling.logit_bias[7]", "nan", {"logit_bias": {7: math.nan}}),
    ("sampling.logit_bias[1]", "100", {"logit_bias": {1: 0.0, 100: 1.0}}),
    ("sampling.seed", str(1 << 64), {"seed": 1 << 64}),
    ("logprobs", "21", {"logprobs": 21}),
    ("stopping.max_tokens", "0", {"max_tokens": 0}),
    ("stopping.min_tokens", "6", {"max_tokens": 5, "min_tokens": 6}),
    ("stopping.min_tokens", "30", {"min_tokens": 30}),
    ("stopping.stop_token_ids[1]", "100", {"stop_token_ids": [1, 100]}),
    ("stopping.stop_token_ids", "65 ids", {"stop_token_ids": [1] * 65}),
    ("stopping.stop", "17 strings", {"stop_strings": ["x"] * 17}),
    ("stopping.stop[1]", "0 characters", {"stop_strings": ["x", ""]}),
    ("stopping.stop[0]", "257 characters", {"stop_strings": ["x" * 257]}),
    ("speculation.max_draft_tokens", "-1", {"max_draft_tokens": -1}),
    ("speculation.min_survival", "1.5", {"min_survival": 1.5}),
    ("speculation.min_survival", "nan", {"min_survival": math.nan}),
]


@pytest.mark.parametrize(("name", "value", "asked"), REFUSED)
def test_refusals_name_the_field_its_value_and_what_is_allowed(name, value, asked) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admit(**asked)
    message = caught.value.message
    assert message.startswith(f"{name} is ") and value in message
    assert "allowed: " in message and message.count("; ") >= 2


def test_too_many_biased_ids_are_refused() -> None:
    wide = Limits(vocab_size=5000, max_context_len=32, eos_token_ids=frozenset())
    assert len(admit(wide, logit_bias=dict.fromkeys(range(1024), 1.0)).sampling.logit_bias) == 1024
    with pytest.raises(InvalidRequest, match=r"sampling.logit_bias is of 1025 ids"):
        admit(wide, logit_bias=dict.fromkeys(range(1025), 1.0))


def test_a_whole_vocabulary_of_stops_contradicts_min_tokens() -> None:
    tiny = Limits(vocab_size=3, max_context_len=32, eos_token_ids=frozenset({2}))
    with pytest.raises(InvalidRequest, match="min_tokens"):
        admit(tiny, prompt_ids=[0], stop_token_ids=[0, 1], min_tokens=1)
    assert admit(tiny, prompt_ids=[0], stop_token_ids=[0, 1], min_tokens=1, ignore_eos=True)


def test_absent_fields_take_the_documented_defaults() -> None:
    request = admit()
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert not sampling.has_penalties and sampling.mode is SamplingMode.REJECTION
    assert sampling.logprobs is None and request.speculation.enabled
    assert (stopping.max_tokens, stopping.min_tokens) == (32, 0)
    assert request.max_len == 32 and request.token_ids == [1, 2, 3]
    assert request.eos_token_ids == {99}


def test_edges_of_what_is_allowed() -> None:
    request = admit(
        prompt_ids=[0] * 31, temperature=0.0, top_p=1e-6, min_p=1.0, top_k=10**9, seed=2**64 - 1,
        logprobs=0, max_tokens=10**9, min_tokens=1, max_draft_tokens=0, min_survival=1.0,
        speculation_enabled=False,
    )  # fmt: skip
    assert request.max_len == 32 and request.sampling.top_k == 100
    assert request.sampling.greedy and not request.speculation.enabled


def test_seeds_are_drawn_and_sessions_numbered() -> None:
    admission = Admission(LIMITS)
    first, second = (admission.admit(Ask(name, [1])) for name in "ab")
    assert first.session_id != second.session_id
    assert first.sampling.seed != second.sampling.seed
    assert admission.admit(Ask("c", [1], seed=0)).sampling.seed == 0


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    request = admit(prompt_ids=prompt)
    request.token_ids.append(4)
    assert prompt == [1, 2, 3]
