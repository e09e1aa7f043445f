"""Logit bias, min_tokens and penalties: changes to single logits, for all rows of a step at once.

Every row is changed as plain decoding would change it, had it emitted the drafts before that row.
Order, as in vLLM: bias, min_tokens, then repetition, frequency and presence penalties.
"""

from collections.abc import Sequence

import numpy as np
import torch

from verifier_svc.sampling.state import Block, Ints


def adjust_(logits: torch.Tensor, blocks: Sequence[Block]) -> None:
    """Changes logits [N, vocab] fp32 in place; row i of the concatenated blocks is row i of it."""
    starts = np.cumsum([0] + [block.num_rows for block in blocks])
    changed = [(int(start), b) for start, b in zip(starts, blocks, strict=False) if b.has_extras]
    _add_bias(logits, [(start, b) for start, b in changed if len(b.state.bias_ids)])
    _mask_stops(logits, changed)
    _penalise(logits, [(start, b) for start, b in changed if b.state.history is not None])


def _add_bias(logits: torch.Tensor, placed: list[tuple[int, Block]]) -> None:
    if not placed:
        return
    rows, ids, values = [], [], []
    for start, block in placed:
        state = block.state
        rows.append(np.repeat(np.arange(start, start + block.num_rows), len(state.bias_ids)))
        ids.append(np.tile(state.bias_ids, block.num_rows))
        values.append(np.tile(state.bias_values, block.num_rows))
    where = (_tensor(rows, logits), _tensor(ids, logits))
    logits.index_put_(where, _tensor(values, logits), accumulate=True)


def _mask_stops(logits: torch.Tensor, placed: list[tuple[int, Block]]) -> None:
    """A token that would end the request cannot be one of its first min_tokens."""
    rows, ids = [], []
    for start, block in placed:
        state = block.state
        num_masked = min(block.num_rows, state.min_tokens - block.request.num_output)
        if num_masked > 0:
            rows.append(np.repeat(np.arange(start, start + num_masked), len(state.stop_ids)))
            ids.append(np.tile(state.stop_ids, num_masked))
    if rows:
        lowest = logits.new_full((), -torch.inf)
        logits.index_put_((_tensor(rows, logits), _tensor(ids, logits)), lowest)


def _penalise(logits: torch.Tensor, placed: list[tuple[int, Block]]) -> None:
    if not placed:
        return
    rows, ids, counts, factors, offsets = [], [], [], [], []
    for start, block in placed:
        params, history = block.state.params, block.state.history
        assert history is not None
        tokens, block_counts, seen = history.block(block.draft_ids)
        row, column = np.nonzero(seen)
        count = block_counts[row, column]
        rows.append(row + start)
        ids.append(tokens[column])
        counts.append(count)
        factors.append(np.full(len(row), params.repetition_penalty, np.float32))
        offset = params.frequency_penalty * count + params.presence_penalty * (count > 0)
        offsets.append(offset.astype(np.float32))
    where = (_tensor(rows, logits), _tensor(ids, logits))
    values, factor = logits[where], _tensor(factors, logits)
    values = torch.where(values > 0, values / factor, values * factor)
    logits.index_put_(where, values - _tensor(offsets, logits))


def _tensor(parts: "list[Ints] | list[np.ndarray]", like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device)
