"""Reads a checkpoint's safetensors, one named tensor at a time, and accounts for all of them.

Safetensors only, single file or shards with an index. Whoever builds a model takes the tensors it
needs, or slices of them, says which others it leaves out on purpose, and `finish` refuses anything
left over. Knows no model.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.device import PeakMemory
from common.errors import LoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {torch.bfloat16, torch.float16, torch.float32}
Part = tuple[slice, ...]  # which slice of a tensor, with start and stop, axis by axis


@dataclass(frozen=True)
class LoadReport:
    """What was read. `num_bytes` as stored; `ignored`: present, known to be unneeded, left out.

    With several ranks: of this one. `num_elsewhere`: tensors that other ranks read alone.
    """

    path: str
    num_tensors: int
    num_bytes: int
    dtypes: dict[str, int]  # stored dtype -> number of tensors
    seconds: float
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    peak_bytes: int = 0  # how far memory rose meanwhile, see PeakMemory
    rank: int = 0
    num_elsewhere: int = 0
    peak_bytes_of_ranks: tuple[int, ...] = ()

    def facts(self) -> dict[str, object]:
        """For the log: what is looked for first, and all of it."""
        return {
            "rank": self.rank,
            "num_bytes": self.num_bytes,
            "peak_bytes": self.peak_bytes,
            "report": self.to_json(),
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint folder. Raises LoadError naming the file and what to do."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(
            f"cannot read {path}: {error.strerror}; pass a checkpoint folder that holds {path.name}"
        ) from error
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__} where an object is expected")
    return value


class Checkpoint:
    """The tensors of one folder, cast to `dtype` and moved to `device` as they are taken.

    Raises LoadError: no safetensors, a broken or truncated file, an index that disagrees with its
    files or points outside the folder.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.path, self.dtype, self.device = path, dtype, device
        self._started, self._memory = time.perf_counter(), PeakMemory(device)
        self._files = {name: _open(path / name) for name in self._file_names()}
        self._where = self._locate()
        self._taken: set[str] = set()
        self._ignored: set[str] = set()
        self._elsewhere: set[str] = set()
        self._notes: list[str] = []
        self._num_bytes = 0
        self._dtypes: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The float tensor `name`, or a part of it. LoadError if it is missing, of another shape as
        a whole, or not floating point.
        """
        stored = self._read(name, shape, part)
        if stored.dtype not in FLOATS:
            raise LoadError(
                f"{self.path}: tensor {name!r} is {_plain(stored.dtype)}; only bf16, fp16 and fp32 "
                "weights are supported; use an unquantised checkpoint"
            )
        return stored.to(device=self.device, dtype=self.dtype)

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The integer tensor `name` as int64, on CPU."""
        stored = self._read(name, shape)
        if stored.dtype not in (torch.int64, torch.int32):
            raise LoadError(
                f"{self.path}: tensor {name!r} is {_plain(stored.dtype)}, not an integer"
            )
        return stored.to(torch.int64)

    def ignore(self, name: str) -> None:
        """Leaves `name` out on purpose, if it is there; the report lists it."""
        if name in self._where:
            self._ignored.add(name)

    def note(self, text: str) -> None:
        """Something about this load that an operator should know."""
        self._notes.append(text)

    def finish(self) -> LoadReport:
        """Raises LoadError naming every tensor that nobody took or ignored."""
        unexpected = sorted(set(self._where) - self._taken - self._ignored - self._elsewhere)
        if unexpected:
            shown = ", ".join(repr(name) for name in unexpected[:8])
            more = f" and {len(unexpected) - 8} more" if len(unexpected) > 8 else ""
            raise LoadError(
                f"{self.path}: {len(unexpected)} tensor(s) that its config.json has no place for: "
                f"{shown}{more}; weights and config do not belong together"
            )
        return LoadReport(
            str(self.path),
            len(self._taken),
            self._num_bytes,
            dict(sorted(self._dtypes.items())),
            round(time.perf_counter() - self._started, 3),
            tuple(sorted(self._ignored)),
            tuple(self._notes),
            self._memory.num_bytes(),
            num_elsewhere=len(self._elsewhere),
        )

    def _read(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        if name not in self._where:
            raise LoadError(
                f"{self.path}: tensor {name!r} {list(shape)} is missing; the checkpoint is "
                "incomplete or its config.json belongs to another one"
            )
        file = self._where[name]
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise LoadError(
                f"{self.path}: tensor {name!r} has shape {list(stored.get_shape())}, its "
                f"config.json asks for {list(shape)}"
            )
        tensor: Tensor = file.get_tensor(name) if part is None else stored[part]
        if name not in self._taken:
            self._taken.add(name)
            self._num_bytes += tensor.numel() * tensor.element_size()
            dtype = _plain(tensor.dtype)
            self._dtypes[dtype] = self._dtypes.get(dtype, 0) + 1
        return tensor

    def _file_names(self) -> list[str]:
        if (self.path / SINGLE).is_file():
            self._index = None
            return [SINGLE]
        if not (self.path / INDEX).is_file():
            raise LoadError(
                f"{self.path} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are "
                "read, pickled weights (*.bin, *.pt) never"
            )
        self._index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(self._index, dict) or not self._index:
            raise LoadError(f"{self.path / INDEX} has no weight_map; download it again")
        names = sorted({str(name) for name in self._index.values()})
        for name in names:
            _stay_inside(self.path, name)
        return names

    def _locate(self) -> dict[str, Any]:
        """Tensor name -> open file; an index must list exactly what its files hold."""
        held = {
            tensor: file_name
            for file_name, file in self._files.items()
            for tensor in file.keys()  # noqa: SIM118 - the file object is not iterable
        }
        if self._index is not None and held != self._index:
            name = min(k for k in {*held, *self._index} if held.get(k) != self._index.get(k))
            raise LoadError(
                f"{self.path / INDEX}: tensor {name!r} is listed in {self._index.get(name)!r} but "
                f"found in {held.get(name)!r}; download the checkpoint again"
            )
        return {tensor: self._files[file_name] for tensor, file_name in held.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise LoadError(f"cannot open {path} ({error}); download the missing file") from error
    except SafetensorError as error:
        raise LoadError(
            f"{path} is broken or was cut off while downloading ({error}); download it again"
        ) from error


def _stay_inside(folder: Path, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.suffix != ".safetensors":
        raise LoadError(
            f"{folder / INDEX} points to {name!r}; entries must be .safetensors files inside the "
            "checkpoint folder"
        )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
