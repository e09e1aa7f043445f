"""From a plan and its drafts to raw target logits: the only verifier file that runs the target.

Lays all entries side by side as rows: a decoding request's anchor and drafts, a prefill chunk's
known tokens. Writes KV and feature rows of every row that runs; those of rejected drafts are
written again by the next round before anything reads them. Decides nothing.
"""

from typing import Protocol

import torch

from common.models.interfaces import KVCache, Target
from common.nn.attention import AttentionBatch, Segment
from verifier_svc.drafting import Drafts
from verifier_svc.features import FeatureStore
from verifier_svc.request import Plan


class StepWatcher(Protocol):
    """Is told how far a forward is, so that others may begin before it ends.

    Only once the last layer is done: a layer is many small operations, between which the thread
    that sends would take the interpreter from this one; the head is two large ones.
    """

    def rows_stored(self) -> None:
        """The feature rows of the whole step are in the store."""
        ...

    def logits_likely(self, logits: torch.Tensor) -> None:
        """As `forward` returns them, but of the likely ids only; see `VocabHead`."""
        ...


class Runner:
    """Runs the target on its KV. `taps`: decoder layers whose outputs make the feature rows."""

    def __init__(
        self,
        model: Target,
        kv: KVCache,
        features: FeatureStore,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.features = features
        self._taps = taps
        self._kv = kv

    @torch.inference_mode()
    def forward(
        self, plan: Plan, drafts: Drafts, watcher: StepWatcher | None = None
    ) -> torch.Tensor:
        """Raw logits, [N, vocab] fp32. For each entry that samples, in plan order, one row after
        its last known token and one after each of its drafts.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        sampled: list[int] = []
        for entry in plan.entries:
            request, start = entry.request, entry.start
            draft = drafts.within(entry)
            first, known = len(token_ids), start + entry.num_tokens
            token_ids += request.token_ids[start:known]
            if draft is not None:
                token_ids += draft.token_ids
            num_rows = len(token_ids) - first
            stop = start + num_rows
            positions += range(start, stop)
            segments.append(Segment(first, num_rows, stop, request.block_table))
            if entry.samples:
                sampled += range(first + entry.num_tokens - 1, first + num_rows)
        hidden = self._run(token_ids, positions, segments)
        if watcher is not None:
            watcher.rows_stored()
        if len(sampled) < len(token_ids):
            hidden = hidden[self._tensor(sampled)]
        if not sampled:
            return hidden.new_zeros(0, self.model.config.vocab_size, dtype=torch.float32)
        return self.model.logits(hidden, None if watcher is None else watcher.logits_likely)

    def _run(
        self, token_ids: list[int], positions: list[int], segments: list[Segment]
    ) -> torch.Tensor:
        self._kv.prepare(segments)
        slots = [
            slot
            for s in segments
            for slot in self._kv.slots_of(s.block_table, s.context_len - s.num_query, s.context_len)
        ]
        batch = AttentionBatch(segments, self._tensor(slots), self._tensor(positions))
        hidden, taps = self.model.forward(self._tensor(token_ids), self._kv, batch, self._taps)
        if taps is not None:
            self.features.write(batch.slots, taps)
        self._kv.settle(segments)
        return hidden

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
