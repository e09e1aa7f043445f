"""Verification: which drafts are kept and which token the target adds, for all requests of a step.

The law of what is emitted is exactly the target's, whatever was drafted. Greedy, coupled, and
sampling with one-hot drafts all let the target choose its own token at every row and keep drafts
while they equal it. (For a one-hot draft that is the rejection rule: it is accepted with the
target's probability, and a mismatch is a sample without it.) Drafts that came with the distribution
they were sampled from take the rejection rule with its residual (Leviathan et al. 2023; DSpark
paper 3.7). Knows logits, plans and drafts; nothing of text, stops or KV.
"""

import enum
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from common.noise import ACCEPT, RESIDUAL, uniform
from verifier_svc.drafting import Drafts
from verifier_svc.request import Plan, Request, SamplingMode, TokenLogprobs, Verdict
from verifier_svc.sampling.draw import inverse_cdf, race, raw_logprobs
from verifier_svc.sampling.logits import adjust_
from verifier_svc.sampling.probs import target_probs
from verifier_svc.sampling.rowwise import arg_max
from verifier_svc.sampling.state import Block, SamplingState


class _Case(enum.IntEnum):
    """How a block is decided; blocks of one case lie side by side while they are worked on."""

    ARG_MAX = 0  # of the raw logits
    ADJUSTED_ARG_MAX = 1
    COUPLED = 2
    SAMPLED = 3  # no drafts, or one-hot ones
    REJECTION = 4


Outcome = tuple[int, int]  # accepted drafts, the token after them


class Verifier:
    """Keeps per-request constants while a request lives; otherwise without state."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Request, SamplingState] = WeakKeyDictionary()

    @torch.inference_mode()
    def verify(
        self, logits: torch.Tensor, plan: Plan, drafts: Drafts, *, guess: bool = False
    ) -> dict[int, Verdict]:
        """logits: raw, [N, vocab] fp32. For each entry that samples, in plan order, one row after
        its last known token and one after each draft. Returns a verdict by such an entry's index.

        guess: the logits are not complete yet, and nobody wants their log-probabilities.
        """
        blocks = self._blocks(plan, drafts)
        assert sum(block.num_rows for block in blocks) == logits.shape[0], logits.shape
        by_case: dict[_Case, list[Block]] = {case: [] for case in _Case}
        for block in blocks:
            by_case[_case(block)].append(block)
        outcomes = _decide(logits, by_case)
        logprobs = {} if guess else _logprobs(logits, blocks, outcomes)
        return {
            block.index: Verdict(
                len(block.draft_ids),
                outcomes[block.index][0],
                _emitted(block, outcomes[block.index]),
                logprobs.get(block.index, ()),
            )
            for block in blocks
        }

    def _blocks(self, plan: Plan, drafts: Drafts) -> list[Block]:
        blocks: list[Block] = []
        row = 0
        for index, entry in enumerate(plan.entries):
            if entry.samples:
                request = entry.request
                state = self._states.get(request)
                if state is None:
                    state = self._states[request] = SamplingState(request)
                draft = drafts.within(entry)
                blocks.append(Block(index, request, state, row, draft))
                row += blocks[-1].num_rows
        return blocks


def _case(block: Block) -> _Case:
    params = block.state.params
    if params.greedy:
        return _Case.ADJUSTED_ARG_MAX if block.has_extras else _Case.ARG_MAX
    if params.mode is SamplingMode.COUPLED:
        return _Case.COUPLED
    sent_probs = block.draft is not None and block.draft.candidate_probs is not None
    return _Case.REJECTION if sent_probs and block.draft_ids else _Case.SAMPLED


def _emitted(block: Block, outcome: Outcome) -> tuple[int, ...]:
    num_accepted, last = outcome
    return (*block.draft_ids[:num_accepted], last)


def _decide(logits: torch.Tensor, by_case: dict[_Case, list[Block]]) -> dict[int, Outcome]:
    """Case by case; the rows that need it are copied, so that raw logits stay raw."""
    outcomes: dict[int, Outcome] = {}
    plain = by_case[_Case.ARG_MAX]
    if plain:
        whole = sum(block.num_rows for block in plain) == logits.shape[0]
        rows = logits if whole else logits[_rows(plain, logits)]
        outcomes |= _matches(plain, arg_max(rows))
    others = [block for case in _Case if case > _Case.ARG_MAX for block in by_case[case]]
    if not others:
        return outcomes
    work = logits[_rows(others, logits)]
    adjust_(work, others)
    adjusted = by_case[_Case.ADJUSTED_ARG_MAX]
    num_arg_max = sum(block.num_rows for block in adjusted)
    if adjusted:
        outcomes |= _matches(adjusted, arg_max(work[:num_arg_max]))
    sampled = others[len(adjusted) :]
    if not sampled:
        return outcomes
    params = [block.state.params for block in sampled for _ in range(block.num_rows)]
    probs = target_probs(work[num_arg_max:], params)
    for case, choose in (
        (_Case.COUPLED, _couple),
        (_Case.SAMPLED, _sample),
        (_Case.REJECTION, None),
    ):
        own = by_case[case]
        num_rows = sum(block.num_rows for block in own)
        if own:
            part = probs[:num_rows]
            outcomes |= _matches(own, choose(part, own)) if choose else _reject(part, own)
        probs = probs[num_rows:]
    return outcomes


def _rows(blocks: Sequence[Block], logits: torch.Tensor) -> torch.Tensor:
    rows = [row for block in blocks for row in range(block.row, block.row + block.num_rows)]
    return torch.tensor(rows, device=logits.device)


def _matches(blocks: Sequence[Block], chosen: torch.Tensor) -> dict[int, Outcome]:
    """Keeps drafts while they equal the target's own choice, `chosen` [rows of all blocks]."""
    token_ids, outcomes, row = chosen.tolist(), {}, 0
    for block in blocks:
        num_accepted = 0
        for draft_id in block.draft_ids:
            if draft_id != token_ids[row + num_accepted]:
                break
            num_accepted += 1
        outcomes[block.index] = (num_accepted, token_ids[row + num_accepted])
        row += block.num_rows
    return outcomes


def _keys(blocks: Sequence[Block], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and position of every row, [rows] int64 each."""
    seeds = [block.state.seed for block in blocks for _ in range(block.num_rows)]
    positions = [block.position + i for block in blocks for i in range(block.num_rows)]
    device = like.device
    return torch.tensor(seeds, device=device), torch.tensor(positions, device=device)


def _couple(probs: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    return race(probs, *_keys(blocks, probs))


def _sample(probs: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    return inverse_cdf(probs, uniform(*_keys(blocks, probs), RESIDUAL))


def _reject(probs: torch.Tensor, blocks: Sequence[Block]) -> dict[int, Outcome]:
    """Keeps draft x while u * draft_probs(x) < target_probs(x), strictly: a token that the target
    cannot emit never passes. Then one token of the residual, or of the target's own if all passed.
    """
    device = probs.device
    draft_ids, candidate_ids, candidate_probs = _padded(blocks, device)
    num_drafts = torch.tensor([len(block.draft_ids) for block in blocks], device=device)
    starts = torch.tensor([block.num_rows for block in blocks], device=device).cumsum(0)
    starts = starts - num_drafts - 1  # first row of each block
    seeds = torch.tensor([block.state.seed for block in blocks], device=device)
    positions = torch.tensor([block.position for block in blocks], device=device)

    steps = torch.arange(draft_ids.shape[1], device=device)
    in_block = steps < num_drafts[:, None]  # [R, L]
    rows = (starts[:, None] + steps).where(in_block, 0)
    own = probs[rows, draft_ids].double()
    drafted = (candidate_probs * (candidate_ids == draft_ids[:, :, None])).sum(2)
    uniforms = uniform(
        seeds.repeat_interleave(len(steps)),
        (positions[:, None] + steps).flatten(),
        ACCEPT,
    ).view_as(own)
    accepts = (uniforms * drafted < own) & in_block
    num_accepted = accepts.cumprod(1).sum(1)

    last = probs[starts + num_accepted]
    at = num_accepted.clamp(max=len(steps) - 1)
    each = torch.arange(len(blocks), device=device)
    rejected = (num_accepted < num_drafts)[:, None]
    minus = (candidate_probs[each, at] * rejected).to(probs.dtype)
    residual = last.scatter_add(1, candidate_ids[each, at], -minus).clamp_(min=0.0)
    # No mass left: draft_probs >= target_probs everywhere, hence equal; the rejection was rounding.
    empty = residual.sum(1, keepdim=True) <= 0.0
    weights = torch.where(empty, last, residual)
    token_ids = inverse_cdf(weights, uniform(seeds, positions + num_accepted, RESIDUAL))
    pairs = zip(num_accepted.tolist(), token_ids.tolist(), strict=True)
    return {block.index: outcome for block, outcome in zip(blocks, pairs, strict=True)}


def _padded(
    blocks: Sequence[Block], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts [R, L] int64, candidate ids [R, L, K] int64 and their probabilities [R, L, K] float64.

    Each row of probabilities is scaled to sum 1: it came rounded, but was sampled from as a whole.
    """
    sent = [_candidates(block) for block in blocks]
    shape = (len(blocks), max(p.shape[0] for _, p in sent), max(p.shape[1] for _, p in sent))
    draft_ids = np.zeros(shape[:2], np.int64)
    candidate_ids = np.zeros(shape, np.int64)
    candidate_probs = np.zeros(shape, np.float64)
    for row, (block, (ids, probs)) in enumerate(zip(blocks, sent, strict=True)):
        count, top_k = probs.shape
        draft_ids[row, :count] = block.draft_ids
        candidate_ids[row, :count, :top_k] = ids
        candidate_probs[row, :count, :top_k] = probs / probs.sum(1, keepdims=True)
    tensors = map(torch.from_numpy, (draft_ids, candidate_ids, candidate_probs))
    first, second, third = (tensor.to(device) for tensor in tensors)
    return first, second, third


def _candidates(block: Block) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    draft = block.draft
    assert draft is not None and draft.candidate_ids is not None
    assert draft.candidate_probs is not None
    return draft.candidate_ids, draft.candidate_probs.astype(np.float64)


def _logprobs(
    logits: torch.Tensor, blocks: Sequence[Block], outcomes: dict[int, Outcome]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """For the requests that asked; of the raw distribution, one per emitted token."""
    rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    asked: list[tuple[int, int]] = []
    for block in blocks:
        wanted = block.state.params.logprobs
        if wanted is not None:
            emitted = _emitted(block, outcomes[block.index])
            rows += range(block.row, block.row + len(emitted))
            token_ids += emitted
            num_top += [wanted] * len(emitted)
            asked.append((block.index, len(emitted)))
    if not asked:
        return {}
    entries = iter(raw_logprobs(logits, rows, token_ids, num_top))
    return {index: tuple(next(entries) for _ in range(count)) for index, count in asked}
