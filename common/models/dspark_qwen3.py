"""DeepSpec's Qwen3 DSpark drafter: context KV from taps, an anchor-first block, its heads.

Follows the paper (arXiv 2607.05147) and the public DeepSpec code. The context never passes a
layer's input norm: fc + hidden_norm once per token, then every layer's own k/v projections. Block
row k - 1 predicts draft k; all block rows see the whole context and each other. Knows sessions only
as KV slots, samples nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import LoadError
from common.loading.safetensors_files import Checkpoint, LoadReport, read_json
from common.models.config import block_shape, flag, positive, whole
from common.models.interfaces import TargetFacts
from common.models.markov import HEADS, ConfidenceHead, VanillaHead
from common.models.registry import read_target_config
from common.nn.attention import AttentionBatch, Segment
from common.nn.block import Block, BlockShape, RMSNorm
from common.nn.linear import Linear
from common.nn.paged_kv import PagedKV
from common.nn.rope import RopeConfig, Rotary, rope_config, rotate

ARCHITECTURE = "Qwen3DSparkModel"


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's config.json, checked against its target's."""

    block: BlockShape
    num_layers: int
    block_size: int  # B: rows of a block and drafts per round, as trained
    target_layer_ids: tuple[int, ...]  # taps: 0-based decoder layers, -1 = embedding output
    mask_token_id: int
    vocab_size: int  # target ids: rows of embed_tokens and of W1
    draft_vocab_size: int  # rows of lm_head and of W2
    markov_rank: int  # 0 = no Markov head
    markov_head_type: str
    has_confidence: bool
    confidence_with_markov: bool
    rope: RopeConfig  # the target's

    family: ClassVar[str] = "qwen3_dspark"
    context_window: ClassVar[int] = 0  # a block attends to the whole context

    @property
    def feature_width(self) -> int:
        """Values per token in the RAW_LAYERS form."""
        return len(self.target_layer_ids) * self.block.hidden_size


def drafter_config(path: Path, target: TargetFacts) -> DrafterConfig:
    """Reads and checks config.json. LoadError names the key, its value and what is allowed."""
    raw, where = read_json(path / "config.json"), str(path / "config.json")
    architecture = (raw.get("architectures") or [None])[0]
    if architecture != ARCHITECTURE:
        raise LoadError(f"{where}: architecture {architecture!r} is not {ARCHITECTURE!r}")
    config = DrafterConfig(
        block=block_shape(raw, where, qk_norm=True),
        num_layers=positive(raw, "num_hidden_layers", where),
        block_size=positive(raw, "block_size", where),
        target_layer_ids=_layer_ids(raw, where, target),
        mask_token_id=whole(raw, "mask_token_id", where),
        vocab_size=positive(raw, "vocab_size", where),
        draft_vocab_size=positive(raw, "draft_vocab_size", where, default=raw.get("vocab_size")),
        markov_rank=whole(raw, "markov_rank", where, default=0),
        markov_head_type=str(raw.get("markov_head_type") or "vanilla"),
        has_confidence=flag(raw, "enable_confidence_head", where),
        confidence_with_markov=flag(raw, "confidence_head_with_markov", where),
        rope=target.rope,
    )
    _check(config, target, where)
    return config


def _layer_ids(raw: Mapping[str, Any], where: str, target: TargetFacts) -> tuple[int, ...]:
    ids: Any = raw.get("target_layer_ids")
    last = target.num_layers - 2  # reference code hands out the last layer's rows after a norm
    integers = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not integers or ids != sorted(set(ids)) or not ids or ids[0] < -1 or ids[-1] > last:
        raise LoadError(
            f"{where}: target_layer_ids {ids!r} must rise strictly inside -1..{last} (the target "
            f"has {target.num_layers} layers, its last one cannot be tapped)"
        )
    return tuple(ids)


def _check(config: DrafterConfig, target: TargetFacts, where: str) -> None:
    """What must hold between keys, and between drafter and target."""
    if config.block.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        raise LoadError(
            f"{where}: hidden_size {config.block.hidden_size} and vocab_size {config.vocab_size} "
            f"must equal the target's {target.hidden_size} and {target.vocab_size}"
        )
    if config.block.head_dim != target.head_dim:
        raise LoadError(
            f"{where}: head_dim {config.block.head_dim} must equal the target's {target.head_dim}: "
            "both use the same rotation"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise LoadError(
            f"{where}: mask_token_id {config.mask_token_id} must lie inside the embedding's "
            f"{config.vocab_size} rows"
        )
    if config.markov_head_type not in HEADS:
        raise LoadError(
            f"{where}: markov_head_type {config.markov_head_type!r} is unknown; known: "
            f"{', '.join(HEADS)}"
        )
    if config.has_confidence and config.confidence_with_markov and not config.markov_rank:
        raise LoadError(f"{where}: confidence_head_with_markov needs a markov_rank above 0")
    if config.draft_vocab_size > config.vocab_size:
        raise LoadError(
            f"{where}: draft_vocab_size {config.draft_vocab_size} exceeds vocab_size "
            f"{config.vocab_size}"
        )


class FeatureProjector:
    """fc + hidden_norm: all that the verifier runs of a drafter in the PROJECTED feature form."""

    def __init__(self, config: DrafterConfig, weights: Checkpoint) -> None:
        d = config.block.hidden_size
        self.fc = Linear(weights.take("fc.weight", (d, config.feature_width)))
        self.hidden_norm = RMSNorm(weights.take("hidden_norm.weight", (d,)), config.block.norm_eps)

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """rows: taps side by side, [T, m * d] -> [T, d]."""
        return self.hidden_norm(self.fc(rows))


class DSparkQwen3:
    """A drafter in memory; all its methods are batched over requests."""

    def __init__(self, config: DrafterConfig, weights: Checkpoint, target: Checkpoint) -> None:
        self.config = config
        self.dtype, self.device = weights.dtype, torch.device(weights.device)
        d, vocab = config.block.hidden_size, config.vocab_size
        self.project = FeatureProjector(config, weights)
        self.embed_tokens = _embedding(weights, target, (vocab, d))
        self.blocks = [
            Block(config.block, i, f"layers.{i}.", weights.take) for i in range(config.num_layers)
        ]
        self.context_proj = _context_proj(config, weights)
        self.context_norm = _context_norm(config, self.blocks)
        self.norm = RMSNorm(weights.take("norm.weight", (d,)), config.block.norm_eps)
        self.d2t = _d2t(config, weights).to(self.device)
        self.lm_head = _lm_head(config, weights, target, self.embed_tokens, self.d2t)
        self.w1: Tensor | None = None
        self.markov: VanillaHead | None = None
        if config.markov_rank:
            self.w1 = weights.take("markov_head.markov_w1.weight", (vocab, config.markov_rank))
            head = HEADS[config.markov_head_type]
            self.markov = head(weights, config.markov_rank, d, config.draft_vocab_size)
        self.confidence_head: ConfidenceHead | None = None
        if config.has_confidence:
            width = d + (config.markov_rank if config.confidence_with_markov else 0)
            self.confidence_head = ConfidenceHead(weights, width)
        weights.ignore("t2d")
        self.rotary = Rotary(config.rope, weights.device)

    def new_kv(self, num_blocks: int, kv_block_size: int) -> PagedKV:
        """A context cache that fits this drafter."""
        shape = self.config.block
        return PagedKV(
            self.config.num_layers,
            num_blocks,
            kv_block_size,
            shape.num_kv_heads,
            shape.head_dim,
            self.dtype,
            self.device,
        )

    @torch.inference_mode()
    def ingest(self, projected: Tensor, kv: PagedKV, slots: Tensor, positions: Tensor) -> None:
        """Writes every layer's context keys and values of rows `project(...)` [T, d]."""
        shape, num_layers = self.config.block, self.config.num_layers
        heads = (-1, num_layers, 2, shape.num_kv_heads, shape.head_dim)
        k, v = self.context_proj(projected).view(heads).unbind(2)
        rotation = self.rotary.rows(positions, projected.dtype)
        k = rotate(self.context_norm(k).flatten(1, 2), rotation).view_as(k)
        kv.write_layers(slots, k, v)

    @torch.inference_mode()
    def block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        num_drafts: int,
        kv: PagedKV,
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """One block per request: anchor_ids, anchor_positions [R] int64; each table holds the
        context (as long as the anchor's position) and B scratch slots after it, which are
        overwritten.

        Returns hidden [R, num_drafts, d] and base logits [R, num_drafts, V_draft] float32, before
        any Markov bias. All B rows run whatever num_drafts is: they see each other, as in training.
        """
        num_requests, rows = anchor_ids.shape[0], self.config.block_size
        assert 1 <= num_drafts <= rows, f"num_drafts {num_drafts} outside 1..{rows}"
        ids = anchor_ids.new_full((num_requests, rows), self.config.mask_token_id)
        ids[:, 0] = anchor_ids
        starts = anchor_positions.tolist()
        batch = AttentionBatch(
            [
                Segment(i * rows, rows, start + rows, table)
                for i, (start, table) in enumerate(zip(starts, block_tables, strict=True))
            ],
            slots=torch.tensor(
                [
                    slot
                    for start, table in zip(starts, block_tables, strict=True)
                    for slot in kv.slots_of(table, start, start + rows)
                ],
                device=self.device,
            ),
            positions=(
                anchor_positions[:, None] + torch.arange(rows, device=self.device)
            ).flatten(),
            causal=False,
        )
        x = F.embedding(ids.flatten(), self.embed_tokens)
        rotation = self.rotary.rows(batch.positions, x.dtype)
        for block in self.blocks:
            x = block(x, rotation, kv, batch)
        wanted = self.norm(x.view(num_requests, rows, -1)[:, :num_drafts].flatten(0, 1))
        logits = self.lm_head(wanted).float()
        shape = (num_requests, num_drafts, -1)
        return wanted.view(shape), logits.view(shape)

    def start_state(self, num_requests: int) -> Tensor | None:
        """State of the Markov head before row 0."""
        return self.markov.start_state(num_requests) if self.markov is not None else None

    @torch.inference_mode()
    def bias(
        self, prev_target_ids: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the previous tokens [R] (the anchor, then each draft) add to the rows hidden [R, d].

        Returns (bias [R, V_draft] or None without a head, the state for the next row).
        """
        if self.markov is None or self.w1 is None:
            return None, None
        return self.markov.bias(F.embedding(prev_target_ids, self.w1), hidden, state)

    @torch.inference_mode()
    def confidence(self, hidden: Tensor, prev_target_ids: Tensor) -> Tensor | None:
        """hidden [R, d], prev_target_ids [R] -> raw logits [R] float32; None without a head."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_with_markov:
            assert self.w1 is not None
            hidden = torch.cat([hidden, F.embedding(prev_target_ids, self.w1)], dim=1)
        return self.confidence_head(hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids, any shape."""
        return self.d2t[draft_ids]


def _embedding(weights: Checkpoint, target: Checkpoint, shape: tuple[int, int]) -> Tensor:
    """The drafter's own copy, or the target's: training leaves it frozen, so both are the same."""
    if "embed_tokens.weight" in weights:
        return weights.take("embed_tokens.weight", shape)
    return target.take("model.embed_tokens.weight", shape)


def _context_proj(config: DrafterConfig, weights: Checkpoint) -> Linear:
    """k and v of all layers as one product, [layers * 2 * kv width, d]: all that context costs."""
    shape = config.block
    width = shape.num_kv_heads * shape.head_dim
    names = [f"layers.{i}.self_attn.{p}_proj" for i in range(config.num_layers) for p in "kv"]
    weight = [weights.take(f"{name}.weight", (width, shape.hidden_size)) for name in names]
    bias = [weights.take(f"{name}.bias", (width,)) for name in names if shape.attention_bias]
    return Linear(torch.cat(weight), torch.cat(bias) if bias else None)


def _context_norm(config: DrafterConfig, blocks: Sequence[Block]) -> RMSNorm:
    """The norm of keys of all layers, [layers, kv heads, head_dim]."""
    norms = [block.qk_norm.weight for block in blocks if block.qk_norm is not None]
    assert len(norms) == config.num_layers, "every Qwen3 block norms its keys"
    keys = [weight[config.block.num_heads :] for weight in norms]
    return RMSNorm(torch.stack(keys), config.block.norm_eps)


def _lm_head(
    config: DrafterConfig,
    weights: Checkpoint,
    target: Checkpoint,
    embed_tokens: Tensor,
    d2t: Tensor,
) -> Linear:
    """The drafter's own rows, or the target's: training freezes them, so both are the same."""
    d = config.block.hidden_size
    if "lm_head.weight" in weights:
        return Linear(weights.take("lm_head.weight", (config.draft_vocab_size, d)))
    rows = embed_tokens
    if "lm_head.weight" in target:
        rows = target.take("lm_head.weight", (config.vocab_size, d))
    return Linear(rows if config.draft_vocab_size == config.vocab_size else rows[d2t])


def _d2t(config: DrafterConfig, weights: Checkpoint) -> Tensor:
    """Target id of every draft id; stored as speculators does: target = draft + d2t[draft]."""
    draft_ids = torch.arange(config.draft_vocab_size)
    if config.draft_vocab_size == config.vocab_size and "d2t" not in weights:
        return draft_ids
    target_ids = draft_ids + weights.take_ids("d2t", (config.draft_vocab_size,))
    outside = (target_ids < 0) | (target_ids >= config.vocab_size)
    if outside.any() or target_ids.unique().numel() != target_ids.numel():
        raise LoadError(
            f"{weights.path}: d2t must map draft ids one to one into 0..{config.vocab_size - 1}; "
            f"{int(outside.sum())} lie outside"
        )
    return target_ids


def load_drafter(
    path: Path | str,
    target_path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[DSparkQwen3, LoadReport]:
    """The drafter, with embed_tokens (and lm_head) from the target where its own file has none."""
    path, target_path = Path(path), Path(target_path)
    target = read_target_config(target_path)
    config = drafter_config(path, target)
    weights = Checkpoint(path, dtype, device)
    with torch.inference_mode():
        model = DSparkQwen3(config, weights, Checkpoint(target_path, dtype, device))
    _note_rope(path, target, weights)
    return model, weights.finish()


def _note_rope(path: Path, target: TargetFacts, weights: Checkpoint) -> None:
    """Positions are the target's, so its rotation rules; a drafter's config may differ."""
    try:
        own = rope_config(read_json(path / "config.json"), target.head_dim, str(path)).canonical()
    except LoadError as error:
        own = error.message
    if own != target.rope.canonical():
        weights.note(
            f"the target's rope {target.rope.canonical()} is used, not the drafter's: {own}"
        )


def load_projector(
    path: Path | str,
    target_path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> FeatureProjector:
    """fc and hidden_norm alone, for a verifier that sends PROJECTED rows."""
    config = drafter_config(Path(path), read_target_config(Path(target_path)))
    with torch.inference_mode():
        return FeatureProjector(config, Checkpoint(Path(path), dtype, device))
