"""Where a DeepSeek-V4 checkpoint's tensors go, and reading them whatever format they are stored in.

The model asks by names of the model (those of `common.detect.names`); this file finds the
checkpoint's tensor and its scales behind them. The format of a matrix follows from how it is stored
(bf16, fp32, fp8, packed fp4); a scale that is missing, misshapen or left over is an error. Reads of
each tensor the slice that is asked for, with the scales that belong to it. Knows no layer.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common.detect.names import ModelTensor, model_tensor
from common.errors import LoadError
from common.loading.block_quant import (
    QuantWeight,
    fp8_weight,
    joined,
    mxfp4_weight,
    nvfp4_weight,
)
from common.loading.safetensors_files import FLOATS, Checkpoint, LoadReport, Part
from common.models.deepseek_v4.config import DeepseekV4Config
from common.models.deepseek_v4.shards import Shards
from common.nn.block import RMSNorm
from common.nn.linear import Linear
from common.nn.quant_linear import QuantLinear, keeps_quantised
from common.parallel import ALONE, Parallel

_EXPERT, _STACKED = re.compile(r"experts\.\d+\.(w[123])"), {"w1": "w13", "w3": "w13", "w2": "w2"}
# What may be stored for a module.
_SUFFIXES = ("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUTSIDE_LAYERS = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head_fn",
    "hc_head_base": "model.hc_head_base",
    "hc_head_scale": "model.hc_head_scale",
}


def target_places(names: Iterable[str], expert_dtype: str) -> dict[ModelTensor, str]:
    """Place in the target -> name in the checkpoint; names without a place are left out."""
    places: dict[ModelTensor, str] = {}
    for name in names:
        if name in _OUTSIDE_LAYERS:
            places[ModelTensor(_OUTSIDE_LAYERS[name])] = name
        elif layer := _LAYER.fullmatch(name):
            # Inside, a layer of the target is named like a stage of the drafter.
            place = model_tensor(f"mtp.{layer[1]}.{layer[2]}", expert_dtype=expert_dtype)
            assert place is not None, name
            places[place] = name
    return places


def drafter_places(names: Iterable[str], expert_dtype: str) -> dict[ModelTensor, str]:
    """Place in the drafter -> name in the checkpoint: `mtp.*`, the target's embedding and head."""
    places = {}
    for name in names:
        place = model_tensor(name, expert_dtype=expert_dtype)
        if place is not None:
            places[place] = name
        elif name in ("embed.weight", "head.weight"):
            places[ModelTensor(_OUTSIDE_LAYERS[name])] = name
    return places


def num_parameters(places: Iterable[ModelTensor]) -> int:
    """Parameters as engines count them that stack a layer's experts: w1 and w3, and w2.

    Of a released drafter 97, or 96 in files without a confidence head.
    """
    return len({_EXPERT.sub(lambda m: f"experts.{_STACKED[m[1]]}", p.name) for p in places})


class DeepseekV4Weights(Checkpoint):
    """The tensors of one role, target or drafter, by their place in the model.

    Shards that hold nothing of the role are not opened, nor need they be there. Block-quantised
    matrices of linear layers are kept as stored or dequantised: keep says which, None lets the
    device decide.
    """

    def __init__(
        self,
        path: Path,
        config: DeepseekV4Config,
        role: Literal["target", "drafter"],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parallel: Parallel = ALONE,
        keep: bool | None = None,
    ) -> None:
        self.shards = Shards(config, parallel)
        self._keep = keeps_quantised(device) if keep is None else keep
        self._kept: Counter[str] = Counter()  # format -> matrices
        self._kept_bytes: Counter[str] = Counter()
        self.config, self._is_drafter = config, role == "drafter"
        self._unopened: Counter[str] = Counter()  # file -> tensors that the index places there
        super().__init__(path, dtype, device)
        find = drafter_places if self._is_drafter else target_places
        self._places = find(self._where, config.expert_dtype)
        for name in self._where:
            if not self._concerns(name):
                self.ignore(name)
        if self._is_drafter:
            own = [place for place, name in self._places.items() if name.startswith("mtp.")]
            self.note(f"{num_parameters(own)} parameters under mtp.*, experts stacked")
        for file, count in sorted(self._unopened.items()):
            self.note(f"{file} not opened: its {count} tensors do not concern the {role}")

    def _concerns(self, name: str) -> bool:
        """Whether this role must have a place for the tensor."""
        if self._is_drafter:
            return name.startswith("mtp.") or name in ("embed.weight", "head.weight")
        return not name.startswith("mtp.")

    def _file_names(self) -> list[str]:
        """The files that the role needs, once the whole index was checked."""
        files = super()._file_names()
        if self._index is not None:
            needed = {file for name, file in self._index.items() if self._concerns(name)}
            self._unopened = Counter(file for file in self._index.values() if file not in needed)
            self._index = {name: file for name, file in self._index.items() if file in needed}
            files = [file for file in files if file in needed]
        return files

    @property
    def names(self) -> list[str]:
        """All tensors of the opened files."""
        return list(self._where)

    def has(self, name: str, shard: int | None = None) -> bool:
        """Whether the checkpoint holds a tensor for this place."""
        return ModelTensor(name, shard) in self._places

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An unquantised tensor in the model's dtype."""
        return self.take(self._source(name, shape), shape)

    def float32(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Tensor:
        """An unquantised tensor, or some of its rows, that the model computes with in float32."""
        part = None if rows is None else (slice(rows.start, rows.stop),)
        stored = self._read(self._source(name, shape), shape, part)
        if stored.dtype not in FLOATS:
            raise LoadError(
                f"{self.path}: tensor {name!r} is {stored.dtype}, not bf16, fp16 or fp32"
            )
        return stored.to(device=self.device, dtype=torch.float32)

    def ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An integer table as int64."""
        return self.take_ids(self._source(name, shape), shape).to(self.device)

    def norm(self, name: str, size: int) -> RMSNorm:
        """The norm `name`."""
        return RMSNorm(self.tensor(f"{name}.weight", (size,)), self.config.norm_eps)

    def linear(
        self,
        cols: int,
        *parts: tuple[str, int | None, int],
        only_rows: range | None = None,
        only_cols: range | None = None,
    ) -> Linear | QuantLinear:
        """One layer from parts (module name, part of a stacked parameter or None, rows).

        only_rows, only_cols: the slice of every part that is needed.
        """
        stored = [
            self._stored(name, (rows, cols), shard, only_rows, only_cols)
            for name, shard, rows in parts
        ]
        kept = [part for part in stored if isinstance(part, QuantWeight)]
        # Parts that are stored differently can only meet as real numbers.
        if self._keep and len(kept) == len(stored) and len({part.format for part in kept}) == 1:
            weight = joined([part.to(self.device) for part in kept], 1)
            self._kept[weight.format] += len(kept)
            self._kept_bytes[weight.format] += weight.num_bytes
            return QuantLinear(weight)
        return Linear(torch.cat([self._plain(part) for part in stored]))

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        shard: int | None = None,
        only_rows: range | None = None,
        only_cols: range | None = None,
    ) -> Tensor:
        """The weight of module `name` [out, in], dequantised where it is stored quantised.

        only_rows, only_cols: the slice that is read and returned; packed fp4 is read as a whole.
        """
        return self._plain(self._stored(name, shape, shard, only_rows, only_cols))

    def _plain(self, stored: Tensor | QuantWeight) -> Tensor:
        if isinstance(stored, QuantWeight):
            stored = stored.to(self.device).dequantised()
        return stored.to(device=self.device, dtype=self.dtype)

    def _stored(
        self,
        name: str,
        shape: tuple[int, int],
        shard: int | None,
        only_rows: range | None,
        only_cols: range | None,
    ) -> Tensor | QuantWeight:
        """See `matrix`; what is quantised stays so, on CPU."""
        source = self._source(f"{name}.weight", shape, shard)
        stored_dtype = self._where[source].get_slice(source).get_dtype()
        rows, cols = shape
        part = _part(shape, only_rows, only_cols)
        if stored_dtype in ("BF16", "F16", "F32"):
            return self.take(source, shape, part)
        if stored_dtype == "F8_E4M3":
            return self._fp8(name, source, shape, shard, part)
        if part is not None:
            raise LoadError(
                f"{self.path}: tensor {source!r} is {stored_dtype}; a rank's slice of it can only "
                "be read from bf16, fp16, fp32 or fp8 e4m3; run on one rank"
            )
        codes = self._read(source, (rows, cols // 2))
        if self.has(f"{name}.weight_scale_2", shard):
            scales = self._scale(name, "weight_scale", (rows, cols // 16), shard)
            return nvfp4_weight(source, codes, scales, self._scalar(name, shard))
        scales = self._scale(name, "weight_scale", (rows, cols // 32), shard)
        return mxfp4_weight(source, codes, scales)

    def _fp8(
        self,
        name: str,
        source: str,
        shape: tuple[int, int],
        shard: int | None,
        part: Part | None,
    ) -> QuantWeight:
        """Codes and the scales of all blocks that they touch, be it in part."""
        block = self.config.weight_block
        whole = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        scale_source = self._source(f"{name}.weight_scale_inv", whole, shard)
        codes = self._read(source, shape, part)
        if part is None:
            return fp8_weight(source, codes, self._read(scale_source, whole), block)
        touched = tuple(
            slice(own.start // size, -(-own.stop // size))
            for own, size in zip(part, block, strict=True)
        )
        scales = self._read(scale_source, whole, touched)
        first = (part[0].start % block[0], part[1].start % block[1])
        return fp8_weight(source, codes, scales, block, first)

    def leave(self, name: str, shard: int | None = None) -> None:
        """The module or tensor `name` is another rank's to read."""
        for whole in (name, *(f"{name}.{suffix}" for suffix in _SUFFIXES)):
            if (source := self._places.get(ModelTensor(whole, shard))) is not None:
                self._elsewhere.add(source)

    def finish(self) -> LoadReport:
        """As Checkpoint has it, for this rank, and what stayed quantised."""
        for kind, count in sorted(self._kept.items()):
            size = self._kept_bytes[kind]
            self.note(f"{count} matrices kept as {kind} on {self.device}: {size} bytes")
        return replace(super().finish(), rank=self.shards.parallel.rank)

    def _scale(self, name: str, suffix: str, shape: tuple[int, int], shard: int | None) -> Tensor:
        return self._read(self._source(f"{name}.{suffix}", shape, shard), shape)

    def _scalar(self, name: str, shard: int | None) -> Tensor:
        """NVFP4's scale of a whole tensor; its calibrated activation scale is of no use here."""
        if self.has(f"{name}.input_scale", shard):
            self.ignore(self._places[ModelTensor(f"{name}.input_scale", shard)])
        source = self._source(f"{name}.weight_scale_2", (), shard)
        shape = tuple(self._where[source].get_slice(source).get_shape())
        return self._read(source, shape)

    def _source(self, name: str, shape: tuple[int, ...], shard: int | None = None) -> str:
        source = self._places.get(ModelTensor(name, shard))
        if source is None:
            part = "" if shard is None else f", part {shard}"
            raise LoadError(
                f"{self.path}: no tensor becomes {name!r}{part} {list(shape)}; the checkpoint is "
                "incomplete, stored in another format, or its config.json belongs to another one"
            )
        return source


def _part(shape: tuple[int, int], rows: range | None, cols: range | None) -> Part | None:
    """None for the whole."""
    own = tuple(
        slice(0, size) if only is None else slice(only.start, only.stop)
        for size, only in zip(shape, (rows, cols), strict=True)
    )
    return None if own == (slice(0, shape[0]), slice(0, shape[1])) else own
