"""The DSpark drafter of a DeepSeek-V4 checkpoint: three layers under `mtp.*` and their heads.

Context rows come from the target's taps alone: main_proj + main_norm once per token, then every
stage's own key projection, past its norms and hyper-connections. A block is the anchor and noise
tokens; each of its rows sees the last `sliding_window` context rows and the whole block. The row
of the anchor predicts the first draft. Confidences look at rows before the final norm, logits at
rows after it. Several ranks share the stages; what is before and behind them is rank 0's. Knows
sessions only as slots, samples nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.detect.files import detect_checkpoint
from common.detect.names import name_problems
from common.errors import LoadError
from common.loading.safetensors_files import LoadReport, read_json
from common.models.deepseek_v4.cache import DeepseekV4Cache
from common.models.deepseek_v4.config import DeepseekV4Config, deepseek_v4_config
from common.models.deepseek_v4.mhc import HyperHead
from common.models.deepseek_v4.model import Layer, head_of, rotaries_of, streams_of
from common.models.deepseek_v4.step import Places, Step, step_of
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.nn.attention import AttentionBatch, Segment
from common.nn.linear import Linear
from common.parallel import ALONE, Parallel

_MAIN_PROJ, _MAIN_NORM = "model.main_proj", "model.main_norm"
_W1, _W2 = "model.markov_head.markov_w1", "model.markov_head.markov_w2"
_CONFIDENCE = "model.confidence_head.proj"


@dataclass(frozen=True)
class DeepseekV4DrafterConfig:
    """What the `dspark_*` keys add to the config that both halves share."""

    model: DeepseekV4Config
    num_stages: int
    block_size: int  # B: rows of a block and drafts per round, as trained
    target_layer_ids: tuple[int, ...]  # taps: outputs of these 0-based layers
    mask_token_id: int  # the noise token
    markov_rank: int

    family: ClassVar[str] = "deepseek_v4_dspark"

    @property
    def context_window(self) -> int:
        """Context rows that a block attends to at most."""
        return self.model.sliding_window

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.model.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        """V4 drafters draft over the whole vocabulary."""
        return self.model.vocab_size

    @property
    def feature_width(self) -> int:
        """Values per token in the RAW_LAYERS form."""
        return len(self.target_layer_ids) * self.model.hidden_size


def drafter_config(path: Path, target_path: Path | None = None) -> DeepseekV4DrafterConfig:
    """target_path: the target's folder, if that may be another one.

    Raises ConfigError for DSpark keys that cannot work, LoadError for all else, such as a target
    with other values than the model that this drafter was made with.
    """
    verdict = detect_checkpoint(path)
    if verdict.kind != "v4_dspark":
        raise LoadError(
            f"{path} carries no DSpark drafter: detection says {verdict.kind!r}; use a checkpoint "
            "whose config.json has the dspark_* keys"
        )
    found = (
        verdict.num_stages,
        verdict.block_size,
        verdict.target_layer_ids,
        verdict.filler_token_id,
        verdict.markov_rank,
    )
    stages, size, taps, noise, rank = found
    # Detection refuses DSpark keys that are incomplete.
    assert stages and size and taps and noise is not None and rank, found
    model = deepseek_v4_config(path, read_json(path / "config.json"))
    if target_path is not None:
        _check_target(path, model, target_path)
    return DeepseekV4DrafterConfig(model, stages, size, taps, noise, rank)


def _check_target(path: Path, model: DeepseekV4Config, target_path: Path) -> None:
    """Sizes and constants of the model; how it is stored and what ends a text may differ."""
    target = deepseek_v4_config(target_path, read_json(target_path / "config.json"))
    may_differ = ("eos_token_ids", "expert_dtype", "weight_block")
    ours, theirs = vars(model), vars(target)
    differing = [key for key in ours if ours[key] != theirs[key] and key not in may_differ]
    if differing:
        key = differing[0]
        raise LoadError(
            f"the drafter in {path} was made with another model than {target_path}: {key} is "
            f"{ours[key]!r} there, {theirs[key]!r} here; use the target that it came with"
        )


class FeatureProjector:
    """main_proj + main_norm: all that the verifier runs of the drafter in the PROJECTED form."""

    def __init__(self, config: DeepseekV4DrafterConfig, weights: DeepseekV4Weights) -> None:
        width = config.model.hidden_size
        self.proj = weights.linear(config.feature_width, (_MAIN_PROJ, None, width))
        self.norm = weights.norm(_MAIN_NORM, width)

    @torch.inference_mode()
    def __call__(self, rows: Tensor) -> Tensor:
        """rows: taps side by side, [T, m * d] -> [T, d]."""
        return self.norm(self.proj(rows))


class BlockStep(Step):
    """The rows of draft blocks, B per segment, which see their context and each other."""

    def window(self, size: int) -> Places:
        """Slots of the `size` newest context rows, then of the whole block, for each row."""
        if size not in self._windows:
            rows = self.segments[0].num_query
            anchors = self.positions.view(-1, rows)[:, :1].repeat_interleave(rows, 0)
            offsets = torch.arange(-size, rows, device=anchors.device)
            positions = anchors + offsets
            slots = self.slots_at(self.all_rows(), positions.clamp(min=0))
            self._windows[size] = slots, positions >= 0
        return self._windows[size]


class DSparkV4:
    """The drafter in memory; all its methods are batched over requests."""

    def __init__(self, config: DeepseekV4DrafterConfig, weights: DeepseekV4Weights) -> None:
        self.config = config
        self.dtype, self.device = weights.dtype, torch.device(weights.device)
        model = config.model
        d = model.hidden_size
        self.embed_tokens = weights.tensor("model.embed_tokens.weight", (model.vocab_size, d))
        self.stages = [
            Layer(model, weights, f"model.layers.{i}.", None, by_token_id=False)
            for i in range(config.num_stages)
        ]
        self.hc_head = HyperHead(model, weights)
        self.norm = weights.norm("model.norm", d)
        self.rotaries = rotaries_of(model, self.device)
        head = head_of(weights)
        # None: another rank's, and so are the next four
        self.lm_head = None if head is None else Linear(head)
        self.confidence_proj: Tensor | None = None
        if weights.shards.leads:
            self._lead(config, weights)
        else:
            for name in (_MAIN_PROJ, _MAIN_NORM, _W1, _W2, _CONFIDENCE):
                weights.leave(name)

    def _lead(self, config: DeepseekV4DrafterConfig, weights: DeepseekV4Weights) -> None:
        table = (config.vocab_size, config.markov_rank)
        self.project = FeatureProjector(config, weights)
        self.w1 = weights.float32(f"{_W1}.weight", table)
        self.w2 = Linear(weights.float32(f"{_W2}.weight", table))
        if weights.has(f"{_CONFIDENCE}.weight"):  # early files have none
            shape = (1, config.model.hidden_size + config.markov_rank)
            self.confidence_proj = weights.float32(f"{_CONFIDENCE}.weight", shape)

    def new_kv(self, num_blocks: int, kv_block_size: int) -> DeepseekV4Cache:
        """A context cache that fits this drafter: one row per stage and slot."""
        window_only = [None] * self.config.num_stages
        reach = self.config.model.sliding_window
        return DeepseekV4Cache(
            self.config.model,
            window_only,
            reach,
            num_blocks,
            kv_block_size,
            self.dtype,
            self.device,
        )

    @torch.inference_mode()
    def ingest(
        self, projected: Tensor, kv: DeepseekV4Cache, slots: Tensor, positions: Tensor
    ) -> None:
        """Writes every stage's context row of rows `project(...)` [T, d]."""
        turn = self.rotaries.plain(positions)
        for stage, state in zip(self.stages, kv.layers, strict=True):
            state.rows.index_copy_(0, slots, stage.attention.key_rows(projected, turn))

    @torch.inference_mode()
    def block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        num_drafts: int,
        kv: DeepseekV4Cache,
        block_tables: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """One block per request: anchor_ids, anchor_positions [R] int64; each table reaches from
        position 0 over the context, which ends before the anchor, to B scratch slots behind it,
        which are overwritten. Of the context, the last `sliding_window` rows are looked at.

        Returns hidden [R, num_drafts, d] (before the final norm) and base logits
        [R, num_drafts, vocab] float32, before any Markov bias; on ranks other than 0, which have no
        head, no logits. All B rows run whatever num_drafts is: they see each other, as in training.
        """
        num_requests, rows = anchor_ids.shape[0], self.config.block_size
        assert 1 <= num_drafts <= rows, f"num_drafts {num_drafts} outside 1..{rows}"
        ids = anchor_ids.new_full((num_requests, rows), self.config.mask_token_id)
        ids[:, 0] = anchor_ids
        positions = anchor_positions[:, None] + torch.arange(rows, device=self.device)
        step = step_of(
            ids.flatten(),
            _blocks(anchor_positions.tolist(), rows, positions.flatten(), block_tables),
            kv,
            self.rotaries,
            kind=BlockStep,
        )
        h = streams_of(F.embedding(step.token_ids, self.embed_tokens), self.config.model.hc_mult)
        for stage, state in zip(self.stages, kv.layers, strict=True):
            h = stage(h, step, state)
        hidden = self.hc_head(
            h.view(num_requests, rows, *h.shape[1:])[:, :num_drafts].flatten(0, 1)
        )
        shape = (num_requests, num_drafts, -1)
        if self.lm_head is None:
            return hidden.view(shape), hidden.new_empty(0)
        logits = self.lm_head(self.norm(hidden).float())
        return hidden.view(shape), logits.view(shape)

    def start_state(self, num_requests: int) -> None:
        """V4's Markov head carries nothing from row to row."""

    @torch.inference_mode()
    def bias(self, prev_target_ids: Tensor, hidden: Tensor, state: None) -> tuple[Tensor, None]:
        """What the previous tokens [R] (the anchor, then each draft) add to a row's logits.

        Returns (bias [R, vocab] float32, None); `hidden` does not matter to this head.
        """
        return self.w2(F.embedding(prev_target_ids, self.w1)), None

    @torch.inference_mode()
    def confidence(self, hidden: Tensor, prev_target_ids: Tensor) -> Tensor | None:
        """hidden [R, d], prev_target_ids [R] -> raw logits [R] float32; None without a head."""
        if self.confidence_proj is None:
            return None
        seen = torch.cat([hidden.float(), F.embedding(prev_target_ids, self.w1)], dim=1)
        return F.linear(seen, self.confidence_proj).squeeze(1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids are target ids."""
        return draft_ids


def _blocks(
    starts: list[int], rows: int, positions: Tensor, tables: Sequence[Sequence[int]]
) -> AttentionBatch:
    segments = [
        Segment(i * rows, rows, start + rows, table)
        for i, (start, table) in enumerate(zip(starts, tables, strict=True))
    ]
    # Where a row goes follows from its position and table, so no slots are given.
    return AttentionBatch(segments, positions.new_empty(0), positions, causal=False)


def load_deepseek_v4_drafter(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    target_path: Path | None = None,
    parallel: Parallel = ALONE,
) -> tuple[DSparkV4, LoadReport]:
    """The drafter alone: `mtp.*`, embedding and head, and only the shards that hold them.

    target_path: see `drafter_config`; no tensor is read there. parallel: of it, this rank's slices.
    LoadError for a tensor or scale that is missing, left over, misshapen or in another stage than
    it belongs to; ConfigError for DSpark keys that cannot work.
    """
    config = drafter_config(Path(path), target_path)
    weights = _weights(Path(path), config, dtype, device, parallel)
    with torch.inference_mode():
        model = DSparkV4(config, weights)
    return model, weights.finish()


def load_deepseek_v4_projector(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    target_path: Path | None = None,
) -> FeatureProjector:
    """main_proj and main_norm alone, for a verifier that sends PROJECTED rows."""
    config = drafter_config(Path(path), target_path)
    with torch.inference_mode():
        return FeatureProjector(config, _weights(Path(path), config, dtype, device))


def _weights(
    path: Path,
    config: DeepseekV4DrafterConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: Parallel = ALONE,
) -> DeepseekV4Weights:
    weights = DeepseekV4Weights(path, config.model, "drafter", dtype, device, parallel)
    problems = name_problems(weights.names, expert_dtype=config.model.expert_dtype)
    if problems:
        raise LoadError(f"{path}: {'; '.join(problems[:3])}; download it again")
    return weights
