"""Chooses the tokens of draft blocks, for all sessions together, one place of the block at a time.

Greedy takes the arg-max. SAMPLED draws from the top-k truncated, renormalised distribution of the
corrected logits at the session's temperature, and keeps exactly that distribution: rejection
sampling is exact only against what was really drawn from. COUPLED takes the arg-max of the same
probabilities in the race (probability over exponential noise) that the verifier will run for the
same token, so that both sides tend to draw the same one. Noise is a pure function of (seed,
position, token id): a draft never depends on what else is in the batch.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.noise import DRAFT, TARGET, exponential_of, keys, to_int64
from drafter_svc.batcher import DraftMode, Sampling

DEFAULT_TOP_K = 64
MAX_TOP_K = 1024  # candidates per token that a verifier may ask for

Candidates = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids and probs, [num_drafts, top_k]


class BlockSampler:
    """A block of `num_drafts` for each of R sessions; `pick` is called once per place, in order."""

    def __init__(
        self,
        wishes: Sequence[Sampling],
        anchor_positions: Sequence[int],
        num_drafts: int,
        to_target_ids: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self._to_target_ids = to_target_ids
        self._groups = [
            _Group(mode, rows, wishes, anchor_positions, num_drafts, device)
            for mode in (DraftMode.SAMPLED, DraftMode.COUPLED)
            if (rows := [i for i, wish in enumerate(wishes) if wish.mode is mode])
        ]
        self._any_greedy = sum(len(group.rows) for group in self._groups) < len(wishes)

    def pick(self, logits: Tensor, place: int) -> Tensor:
        """logits: [R, V_draft], Markov bias included, for the token `place` + 1 after the anchor.

        Returns target token ids, [R] int64.
        """
        if self._any_greedy:
            chosen = self._to_target_ids(logits.argmax(-1))
        else:
            chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for group in self._groups:
            chosen[group.row_index] = group.pick(logits, place, self._to_target_ids)
        return chosen

    def candidates(self) -> dict[int, Candidates]:
        """For every SAMPLED row, what each of its tokens was drawn from."""
        found: dict[int, Candidates] = {}
        for group in self._groups:
            if group.mode is DraftMode.SAMPLED:
                ids = torch.stack(group.ids, 1).to("cpu", torch.int32).numpy()
                probs = torch.stack(group.probs, 1).cpu().numpy()
                for i, (row, top_k) in enumerate(zip(group.rows, group.top_ks, strict=True)):
                    found[row] = (ids[i, :, :top_k], probs[i, :, :top_k])
        return found


class _Group:
    """The rows of one stochastic mode."""

    def __init__(
        self,
        mode: DraftMode,
        rows: list[int],
        wishes: Sequence[Sampling],
        anchor_positions: Sequence[int],
        num_drafts: int,
        device: torch.device,
    ) -> None:
        own = [wishes[row] for row in rows]
        self.mode, self.rows = mode, rows
        self.top_ks = [wish.top_k or DEFAULT_TOP_K for wish in own]
        self.ids: list[Tensor] = []  # per place [rows, max top_k], target ids
        self.probs: list[Tensor] = []  # per place [rows, max top_k] fp32
        self.row_index = torch.tensor(rows, device=device)
        self._temperatures = torch.tensor([[wish.temperature] for wish in own], device=device)
        seeds = torch.tensor([to_int64(wish.seed) for wish in own], device=device)
        first = torch.tensor([anchor_positions[row] + 1 for row in rows], device=device)
        positions = first + torch.arange(num_drafts, device=device)[:, None]  # of drafted tokens
        domain = DRAFT if mode is DraftMode.SAMPLED else TARGET
        noise_keys = keys(seeds.repeat(num_drafts), positions.flatten(), domain)
        self._noise_keys = noise_keys.view(num_drafts, -1)
        widths = torch.tensor(self.top_ks, device=device)
        self._beyond = torch.arange(max(self.top_ks), device=device) >= widths[:, None]
        self._ragged = min(self.top_ks) < max(self.top_ks)

    def pick(self, logits: Tensor, place: int, to_target_ids: Callable[[Tensor], Tensor]) -> Tensor:
        width = min(max(self.top_ks), logits.shape[-1])
        scaled = logits[self.row_index].float() / self._temperatures
        top = scaled.topk(width, dim=-1)
        values = top.values
        if self._ragged:
            values = values.masked_fill(self._beyond[:, :width], -torch.inf)
        probs = values.softmax(-1)
        ids = to_target_ids(top.indices)
        race = probs / exponential_of(self._noise_keys[place], ids)
        if self.mode is DraftMode.SAMPLED:
            self.ids.append(ids)
            self.probs.append(probs)
        return ids.gather(-1, race.argmax(-1, keepdim=True)).squeeze(-1)
