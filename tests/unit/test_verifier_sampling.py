"""Batched sampling against a straight-line reference: one row at a time, float64, plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import noise
from verifier_svc.drafting import Draft
from verifier_svc.request import (
    Request,
    SamplingMode,
    SamplingParams,
    SpeculationParams,
    StopParams,
)
from verifier_svc.sampling.draw import inverse_cdf, race, raw_logprobs
from verifier_svc.sampling.logits import adjust_
from verifier_svc.sampling.probs import target_probs
from verifier_svc.sampling.state import Block, SamplingState

VOCAB = 23
EOS = 22


def make_request(params: SamplingParams, token_ids: list[int], num_prompt: int, **stops) -> Request:
    stopping = StopParams(max_tokens=100, **stops)
    eos = frozenset({EOS})
    return Request(
        "r", 1, token_ids, num_prompt, params, stopping, SpeculationParams(), eos, num_prompt + 100
    )


def reference_logits(logits: np.ndarray, request: Request, drafts: tuple[int, ...]) -> np.ndarray:
    """What plain decoding would make of `logits` after prompt, output and `drafts`."""
    params, stopping = request.sampling, request.stopping
    prompt = request.token_ids[: request.num_prompt]
    output = [*request.token_ids[request.num_prompt :], *drafts]
    row = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(output) < stopping.min_tokens:
        row[list(stopping.stop_token_ids)] = -math.inf
        if not stopping.ignore_eos:
            row[list(request.eos_token_ids)] = -math.inf
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


def reference_probs(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    row = row / params.temperature
    row = np.where(np.exp(row - row.max()) >= params.min_p, row, -math.inf)
    if params.top_k:
        row = np.where(row >= np.sort(row)[::-1][params.top_k - 1], row, -math.inf)
    probs = np.exp(row - row.max())
    probs /= probs.sum()
    threshold = 0.0
    if params.top_p < 1:
        total = 0.0
        for value in np.sort(probs)[::-1]:
            total += value
            if total >= params.top_p:
                threshold = value
                break
    probs = np.where(probs >= threshold, probs, 0.0)
    return probs / probs.sum()


def blocks_of(cases: list[tuple[Request, tuple[int, ...]]]) -> list[Block]:
    blocks, row = [], 0
    for index, (request, drafts) in enumerate(cases):
        blocks.append(Block(index, request, SamplingState(request), row, Draft(drafts)))
        row += len(drafts) + 1
    return blocks


tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((2, 3.0), (9, -100.0))]),
)


@given(
    cases=st.lists(
        st.tuples(
            params_strategy,
            st.lists(tokens, min_size=1, max_size=6),
            st.integers(1, 6),
            st.lists(tokens, max_size=4).map(tuple),
            st.sampled_from([{}, {"min_tokens": 3}, {"min_tokens": 4, "stop_token_ids": (1, 5)},
                             {"min_tokens": 4, "ignore_eos": True}]),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_row_of_a_mixed_batch_equals_plain_decoding_alone(cases, seed) -> None:
    asked = [
        (make_request(params, list(known), min(num_prompt, len(known)), **stops), drafts)
        for params, known, num_prompt, drafts, stops in cases
    ]
    blocks = blocks_of(asked)
    num_rows = sum(block.num_rows for block in blocks)
    raw = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    work = raw.clone()
    adjust_(work, blocks)
    adjusted = work.clone()
    row_params = [b.state.params for b in blocks for _ in range(b.num_rows)]
    probs = target_probs(work, row_params)
    for block in blocks:
        for i in range(block.num_rows):
            row = block.row + i
            expected = reference_logits(raw[row].numpy(), block.request, block.draft_ids[:i])
            np.testing.assert_allclose(adjusted[row].numpy(), expected, rtol=1e-5, atol=1e-5)
            # The same float32 logits go in, so that no threshold is decided by rounding.
            expected = reference_probs(adjusted[row].double().numpy(), block.state.params)
            np.testing.assert_allclose(probs[row].numpy(), expected, rtol=1e-4, atol=1e-6)
    alone = [
        target_probs(adjusted[row : row + 1].clone(), row_params[row : row + 1])
        for row in range(num_rows)
    ]
    assert torch.equal(torch.cat(alone), probs), "a row depends on its neighbours"


def test_history_follows_a_growing_request() -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25)
    request = make_request(params, [3, 3, 4], 2)
    [block] = blocks_of([(request, (7, 7, 3))])
    for _ in range(200):
        raw = torch.linspace(-3, 3, VOCAB).repeat(block.num_rows, 1)
        work = raw.clone()
        adjust_(work, [block])
        for i in range(block.num_rows):
            expected = reference_logits(raw[i].numpy(), request, block.draft_ids[:i])
            np.testing.assert_allclose(work[i].numpy(), expected, rtol=1e-4, atol=1e-4)
        request.token_ids.append(len(request.token_ids) * 7 % VOCAB)


def test_more_distinct_tokens_than_the_history_was_made_for() -> None:
    vocab = 1000
    params = SamplingParams(presence_penalty=1.0)
    request = make_request(params, [0], 1)
    state = SamplingState(request)
    request.token_ids += range(1, 700)
    work = torch.zeros(1, vocab)
    adjust_(work, [Block(0, request, state, 0, None)])
    assert work[0].tolist() == [0.0] + [-1.0] * 699 + [0.0] * 300


def test_ties_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = target_probs(logits.clone(), [SamplingParams(top_k=2)])[0] > 0
    assert kept.tolist() == [True, True, True, True, False]
    kept = target_probs(logits.clone(), [SamplingParams(top_p=0.5)])[0] > 0
    assert kept.tolist() == [True, True, True, True, False]


def test_top_p_counts_only_what_min_p_and_top_k_left() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    for first in ({"min_p": 0.5}, {"top_k": 2}):  # 0.5 and 0.3 are left, as 0.625 and 0.375
        kept = target_probs(logits.clone(), [SamplingParams(top_p=0.6, **first)])[0] > 0
        assert kept.tolist() == [True, False, False, False], first


def test_a_wide_nucleus_beside_a_row_without_limits() -> None:
    logits = torch.linspace(0, 0.1, 1000)[torch.randperm(1000)][None]
    params = SamplingParams(top_p=0.75)
    probs = target_probs(logits.clone(), [params])
    np.testing.assert_allclose(
        probs[0].numpy(), reference_probs(logits[0].double().numpy(), params), rtol=1e-4
    )
    both = target_probs(logits.repeat(2, 1), [params, SamplingParams()])
    assert torch.equal(both[0], probs[0]) and torch.equal(both[1], logits[0].softmax(0))


def test_inverse_cdf_never_draws_what_has_no_weight() -> None:
    weights = torch.tensor([[0.0, 0.0, 1e-20, 0.0, 2.0, 0.0, 0.0]]).repeat(4, 1)
    extremes = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, 1e-30], dtype=torch.float64)
    drawn = inverse_cdf(weights, extremes).tolist()
    assert set(drawn) <= {2, 4} and drawn[3] == 2


@pytest.mark.parametrize("support", [2, 30, 400])
def test_race_is_a_sample_and_a_function_of_its_key(support: int) -> None:
    vocab, n = 400, 20_000
    base = torch.zeros(vocab)
    base[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:support]] = 1.0
    probs = (base / base.sum()).repeat(n, 1)
    seeds, positions = torch.arange(n), torch.arange(n) % 7
    drawn = race(probs, seeds, positions)
    counts = torch.bincount(drawn, minlength=vocab)
    assert counts[base == 0].sum() == 0
    expected = n / support
    statistic = float(((counts[base > 0] - expected) ** 2 / expected).sum())
    assert statistic < support + 5 * math.sqrt(2 * support)
    assert torch.equal(race(probs[:3], seeds[:3], positions[:3]), drawn[:3])
    # The gathered and the dense path agree, so a neighbour's truncation changes nothing.
    wide = torch.cat([probs[:3], torch.full((1, vocab), 1 / vocab)])
    keys = torch.tensor([0, 1, 2, 9]), torch.tensor([0, 1, 2, 9])
    assert torch.equal(race(wide, *keys)[:3], drawn[:3])


def test_race_agrees_with_gumbel_noise_on_the_candidates_a_drafter_has() -> None:
    probs = torch.rand(50, VOCAB).softmax(1)
    seeds, positions = torch.arange(50), torch.arange(50)
    ids = probs.topk(8).indices
    gumbel = -noise.exponential(seeds, positions, noise.TARGET, ids).log()
    scores = probs.gather(1, ids).log() + gumbel
    guess = ids.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
    drawn = race(probs, seeds, positions)
    among = (ids == drawn[:, None]).any(1)
    assert among.any() and torch.equal(guess[among], drawn[among])


def test_raw_logprobs() -> None:
    logits = torch.randn(4, VOCAB)
    expected = logits.double().log_softmax(1)
    entries = raw_logprobs(logits, [3, 1], [5, 0], [2, 0])
    assert entries[0].logprob == pytest.approx(float(expected[3, 5]), abs=1e-5)
    assert entries[1].logprob == pytest.approx(float(expected[1, 0]), abs=1e-5)
    best = expected[3].topk(2)
    assert entries[0].top_ids == tuple(best.indices.tolist())
    assert entries[0].top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)
    assert entries[1].top_ids == ()


def test_modes_do_not_change_the_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_k=4)
    logits = torch.randn(1, VOCAB)
    coupled = target_probs(logits.clone(), [replace(params, mode=SamplingMode.COUPLED)])
    assert torch.equal(coupled, target_probs(logits.clone(), [params]))
