"""Reads config.json and the tensor index of a checkpoint, bounded and without surprises.

Refuses before parsing what is too big, no regular file, GGUF, or a training run's folder. Knows
what files are called, nothing of what their keys mean.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from common.detect.api import detect
from common.detect.index import INDEX_FILE
from common.detect.refusal import refuse, show
from common.detect.verdict import Verdict

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 8 << 20  # published ones stay below 1 MiB, long quantiser lists included
MAX_INDEX_BYTES = 64 << 20  # 100 bytes for each of 600,000 tensors
_GGUF_MAGIC = b"GGUF"
_GGUF_HEAD_BYTES = 64 << 10
_GGUF_KEY = b"general.architecture"
# general.architecture -> who reads such a file.
_GGUF_READERS = {
    "dflash": "llama.cpp",
    "dspark": "an old llama.cpp fork; upstream refuses this architecture",
    "dflash-draft": "an old llama.cpp fork; upstream refuses this architecture",
    "deepseek4-dspark": "SGLang or ds4",
}


def detect_checkpoint(path: str | Path) -> Verdict:
    """`detect` on the config and index at `path`, named after it.

    Raises:
        ConfigError: what `read_checkpoint_config`, `read_checkpoint_index` and `detect` raise.
    """
    config = read_checkpoint_config(path)
    return detect(config, index=read_checkpoint_index(path), name=str(path))


def read_checkpoint_config(path: str | Path) -> dict[str, Any]:
    """The parsed config at `path`: a checkpoint folder, a config.json, or a weight file beside one.

    Raises:
        ConfigError: E20, with what was found there and what to point at instead.
    """
    file = _config_file(Path(path))
    config = _parse(file, MAX_CONFIG_BYTES)
    if not config:
        raise refuse("E20", f"{_at(file)} is an empty object.", "a complete config.json")
    return config


def read_checkpoint_index(path: str | Path) -> dict[str, Any] | None:
    """The parsed model.safetensors.index.json beside the config at `path`; None without one.

    Raises:
        ConfigError: E20, it is there but cannot be read or holds no `weight_map`.
    """
    config_file = _config_file(Path(path))
    file = config_file.with_name(INDEX_FILE)
    if config_file.name != CONFIG_FILE or not os.path.lexists(file):
        return None
    index = _parse(file, MAX_INDEX_BYTES)
    if not isinstance(index.get("weight_map"), dict):
        raise refuse("E20", f"{_at(file)} has no `weight_map` object.", "download the file again")
    return index


def _config_file(path: Path) -> Path:
    """Which file holds the config for `path`."""
    if stat.S_ISDIR(_mode(path)):
        file = path / CONFIG_FILE
        if not os.path.lexists(file):
            _refuse_folder(path)
        return file
    if path.suffix == ".gguf" or (
        path.suffix != ".safetensors" and _head(path, len(_GGUF_MAGIC)) == _GGUF_MAGIC
    ):
        _refuse_gguf(path)
    return path.with_name(CONFIG_FILE) if path.suffix == ".safetensors" else path


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refuse(
            "E20",
            f"{_at(path)} cannot be opened: {_reason(error)}.",
            "the local folder of a downloaded checkpoint, which holds config.json",
        ) from None


def _parse(file: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `file`; nothing but a regular file within bounds is opened at all."""
    mode = _mode(file)
    if not stat.S_ISREG(mode):
        raise refuse("E20", f"{_at(file)} is no regular file.", f"a readable {file.name}")
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise refuse(
            "E20", f"{_at(file)} cannot be read: {_reason(error)}.", f"a readable {file.name}"
        ) from None
    if len(data) > max_bytes:
        raise refuse(
            "E20",
            f"{_at(file)} is larger than {max_bytes} bytes and was not parsed.",
            f"the {file.name} of a checkpoint, which is far smaller",
        )
    if data.startswith(_GGUF_MAGIC):
        _refuse_gguf(file)
    try:
        value = json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError, MemoryError) as error:
        ours = file.name in (CONFIG_FILE, INDEX_FILE)
        raise refuse(
            "E20",
            f"{_at(file)} is not valid JSON: {_reason(error)}.",
            f"download {file.name} again" if ours else f"the {CONFIG_FILE} of a checkpoint",
        ) from None
    if not isinstance(value, dict):
        raise refuse(
            "E20",
            f"{_at(file)} holds a JSON {type(value).__name__}, not an object.",
            "the config.json of a Hugging Face checkpoint",
        )
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that is given twice, of which a parser would silently keep the last."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {show(key)} is there twice in one object")
        value[key] = item
    return value


def _refuse_folder(path: Path) -> NoReturn:
    try:
        names = sorted(os.listdir(path))[:10_000]
    except OSError as error:
        raise refuse(
            "E20", f"{_at(path)} cannot be listed: {_reason(error)}.", "a readable folder"
        ) from None
    if CONFIG_FILE in names:  # `lexists` could not see it
        raise refuse("E20", f"{_at(path)} cannot be entered.", "a folder you may search (x bit)")
    if any(
        n in ("step_latest", "train_config.py") or n.startswith("training_state") for n in names
    ):
        raise refuse(
            "E20",
            f"{_at(path)} has no {CONFIG_FILE} and looks like a training run's folder.",
            f"the checkpoint inside it: {_step_folder(path, names)}",
        )
    gguf = [n for n in names if n.endswith(".gguf")]
    if gguf:
        _refuse_gguf(path / gguf[0])
    raise refuse(
        "E20",
        f"{_at(path)} has no {CONFIG_FILE}; it holds {show(names)}.",
        "the folder that holds config.json beside the weights",
    )


def _step_folder(run: Path, names: list[str]) -> str:
    """A checkpoint inside a training run: the latest step that has a config, else where to look."""
    latest = run / "step_latest"
    steps = [latest, *(run / n for n in reversed(names) if n.startswith("step_"))]
    for step in steps:
        if os.path.isfile(step / CONFIG_FILE):  # False, where Path.is_file would raise, if denied
            return str(step)
        if nested := sorted(step.glob("*/" + CONFIG_FILE)):
            return str(nested[-1].parent)
    return f"{latest}/<step>"


def _refuse_gguf(path: Path) -> NoReturn:
    name = _gguf_architecture(_head(path, _GGUF_HEAD_BYTES))
    reader = _GGUF_READERS.get(name or "", "llama.cpp")
    raise refuse(
        "E20",
        f"{_at(path)} is a GGUF file (GGUF_UNSUPPORTED; `general.architecture` {show(name)}); only "
        f"safetensors with a {CONFIG_FILE} are served here.",
        "the original safetensors checkpoint",
        f"for this file itself: {reader}",
    )


def _head(path: Path, num_bytes: int) -> bytes:
    if not os.path.isfile(path):
        return b""  # opening a FIFO would wait for ever
    try:
        with path.open("rb") as stream:
            return stream.read(num_bytes)
    except OSError:
        return b""  # the caller's own read says why


def _gguf_architecture(head: bytes) -> str | None:
    """The value after the key: u32 type (8 = string), u64 length, bytes; None when it is not so."""
    at = head.find(_GGUF_KEY)
    if at < 0:
        return None
    value = head[at + len(_GGUF_KEY) :]
    if int.from_bytes(value[:4], "little") != 8:
        return None
    length = int.from_bytes(value[4:12], "little")
    return value[12 : 12 + min(length, 64)].decode("utf-8", "replace")


def _at(path: Path) -> str:
    return f"`{path.name or '.'}` at {show(str(path))}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "out of memory" if isinstance(error, MemoryError) else show(str(error))
