"""What the services ask of a target, of a drafter and of the caches that these make.

Protocols only. Families implement them without naming them; the mappings in `registry.py` and
`drafters.py` are where mypy holds them to it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from common.nn.attention import AttentionBatch, Segment
from common.nn.rope import RopeConfig
from common.nn.vocab_head import Midway

Numerics = Literal["fast", "batch_invariant"]
Projection = Callable[[Tensor], Tensor]  # taps [T, num_taps * hidden_size] -> [T, hidden_size]


class TargetFacts(Protocol):
    """A target's config, as far as services and contract need it."""

    @property
    def family(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def kv_block_multiple(self) -> int:
        """A KV block's tokens must be a multiple of this."""
        ...


class KVCache(Protocol):
    """The state of all requests. A position's rows are found by its request's block table."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_slots(self) -> int:
        """Places for what a position leaves behind; `slots_of` says which."""
        ...

    @property
    def num_bytes(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def prepare(self, segments: Sequence[Segment]) -> None:
        """Before the slots of a forward's rows are asked for."""
        ...

    def settle(self, segments: Sequence[Segment]) -> None:
        """After the forward and after everything that reads its slots."""
        ...

    def release(self, block_ids: Iterable[int]) -> None:
        """No request holds these blocks any more."""
        ...

    def slots_of(self, block_table: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop)."""
        ...


class Target(Protocol):
    """A target in memory; rows of several requests side by side in, one row each out."""

    @property
    def config(self) -> TargetFacts: ...
    @property
    def device(self) -> torch.device: ...

    def num_recent_blocks(
        self, kv_block_size: int, max_requests: int, max_batch_tokens: int
    ) -> int | None:
        """Blocks with rows of every position that suffice for so many live requests and rows per
        forward, if older positions leave less behind; None if they do not.
        """
        ...

    def new_kv(
        self,
        num_blocks: int,
        kv_block_size: int,
        num_recent_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """A cache that fits this model; on the "meta" device one that only tells its size."""
        ...

    def forward(
        self, token_ids: Tensor, kv: Any, batch: AttentionBatch, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """token_ids [T] int64, kv: this model's -> rows [T, d] for `logits`, and the taps
        [T, len(taps) * d]: outputs of these 0-based layers side by side; None if no taps.
        """
        ...

    def logits(self, hidden: Tensor, midway: Midway | None = None) -> Tensor:
        """hidden: rows of `forward`, [N, d]. Returns float32 [N, vocab_size]; see `VocabHead`."""
        ...


class DrafterFacts(Protocol):
    """A drafter's config, as far as services and contract need it."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def mask_token_id(self) -> int: ...
    @property
    def feature_width(self) -> int: ...
    @property
    def context_window(self) -> int:
        """How many of the newest context rows a block attends to; 0: all of them."""
        ...


class DraftModel(Protocol):
    """A drafter in memory; all its methods are batched over requests."""

    @property
    def config(self) -> DrafterFacts: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def project(self) -> Projection: ...

    def new_kv(self, num_blocks: int, kv_block_size: int) -> KVCache:
        """A context cache that fits this drafter."""
        ...

    def ingest(self, projected: Tensor, kv: Any, slots: Tensor, positions: Tensor) -> None:
        """Writes the context of rows `project(...)` [T, d] into slots [T] of kv, this model's."""
        ...

    def block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        num_drafts: int,
        kv: Any,
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """One block per request -> hidden [R, num_drafts, d], logits [R, num_drafts, V_draft]."""
        ...

    def start_state(self, num_requests: int) -> Any:
        """State of the Markov head before row 0."""
        ...

    def bias(
        self, prev_target_ids: Tensor, hidden: Tensor, state: Any
    ) -> tuple[Tensor | None, Any]:
        """What the previous tokens [R] add to the logits of rows [R, d], and the next state."""
        ...

    def confidence(self, hidden: Tensor, prev_target_ids: Tensor) -> Tensor | None:
        """Raw logits [R] float32; None without a head."""
        ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids, any shape."""
        ...
