"""Reading a config from disk: every kind of wrong file ends as E20, quickly and within bounds."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.detect.files import (
    MAX_CONFIG_BYTES,
    detect_checkpoint,
    read_checkpoint_config,
    read_checkpoint_index,
)
from common.errors import ConfigError
from common.testing import configs as c


def folder_with(tmp_path: Path, text: str | bytes, name: str = "config.json") -> Path:
    data = text.encode() if isinstance(text, str) else text
    (tmp_path / name).write_bytes(data)
    return tmp_path


def refused(path: Path | str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        detect_checkpoint(path)
    assert caught.value.code == "E20" and caught.value.hints, caught.value
    return caught.value


def test_a_folder_a_config_and_a_weight_file_are_the_same(tmp_path: Path) -> None:
    folder_with(tmp_path, json.dumps(c.FLASH_0731))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(c.IDX_DSPARK))
    names = ("", "config.json", "model.safetensors")
    verdicts = [detect_checkpoint(tmp_path / name if name else tmp_path) for name in names]
    assert {v.kind for v in verdicts} == {"v4_dspark"}
    assert all(v.index_checked for v in verdicts)
    assert verdicts[0].name == str(tmp_path)


def test_a_config_under_another_name_takes_no_index(tmp_path: Path) -> None:
    folder_with(tmp_path, json.dumps(c.FLASH_0731), "other.json")
    (tmp_path / "model.safetensors.index.json").write_text("not json")
    assert read_checkpoint_index(tmp_path / "other.json") is None
    assert not detect_checkpoint(tmp_path / "other.json").index_checked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1, 2]", "JSON list"),
        ("null", "JSON NoneType"),
        ("{}", "empty object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
        ('{"dspark_block_size": 5, "dspark_block_size": 7}', "'dspark_block_size' is there twice"),
        (b"\xff\xfe\x00\xd8", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_json(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert words in refused(folder_with(tmp_path, text)).message


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_bytes_end_in_a_config_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = folder_with(tmp_path_factory.mktemp("any"), data)
    try:
        assert isinstance(read_checkpoint_config(folder), dict)
    except ConfigError as error:
        assert error.code == "E20"


def test_a_huge_config_is_refused_before_parsing(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.write(b'{"a": "')
        stream.truncate(100 << 20)  # sparse: 100 MiB that take no disk
    start = time.process_time()
    assert f"{MAX_CONFIG_BYTES} bytes" in refused(tmp_path).message
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    folder_with(tmp_path, json.dumps(c.FLASH_0731))
    folder_with(tmp_path, index, "model.safetensors.index.json")
    assert "model.safetensors.index.json" in refused(tmp_path).message


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "config.json")
    assert "symbolic links" in refused(tmp_path).message
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in refused(tmp_path / "loop").message


def test_a_dangling_link_and_no_such_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone.json")
    assert "No such file" in refused(tmp_path).message
    assert "No such file" in refused(tmp_path / "nowhere").message
    assert "null" in refused("a\0b").message


def test_what_is_no_regular_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # opening it would wait for ever
    assert "no regular file" in refused(tmp_path).message
    assert "no regular file" in refused("/dev/zero").message
    nested = tmp_path / "x"
    (nested / "config.json").mkdir(parents=True)
    assert "no regular file" in refused(nested).message
    (tmp_path / "gguf").mkdir()
    os.mkfifo(tmp_path / "gguf" / "x.gguf")
    for path in (tmp_path / "gguf", tmp_path / "gguf" / "x.gguf"):
        assert "GGUF_UNSUPPORTED" in refused(path).message


def test_a_fifo_beside_a_good_config_is_no_index(tmp_path: Path) -> None:
    folder_with(tmp_path, json.dumps(c.FLASH_0731))
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert "no regular file" in refused(tmp_path).message


def test_names_from_the_disk_cannot_break_the_line(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"a\xff\n\x1b[2J")
    (folder / "step_1").mkdir(parents=True)
    (folder / "train_config.py").write_text("")
    assert refused(folder / "none").message.isprintable()
    assert refused(folder).message.isprintable()
    folder_with(folder / "step_1", json.dumps(c.LLAMA))
    message = refused(folder).message
    assert message.isprintable() and "\\udcff\\n\\x1b[2J/step_1" in message


def test_index_values_are_never_followed(tmp_path: Path) -> None:
    """They are file names; only a loader may open them, after its own checks."""
    folder_with(tmp_path, json.dumps(c.FLASH_0731))
    index = {"weight_map": dict.fromkeys(c.DSPARK_NAMES, "../../../../etc/passwd")}
    folder_with(tmp_path, json.dumps(index), "model.safetensors.index.json")
    assert detect_checkpoint(tmp_path).num_stages == 3


def test_an_unreadable_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, json.dumps(c.LLAMA))

    def denied(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # chmod would not stop root
    assert "Permission denied" in refused(tmp_path).message


def test_a_training_runs_folder_points_at_its_latest_step(tmp_path: Path) -> None:
    (tmp_path / "train_config.py").write_text("")
    (tmp_path / "training_state.rank0.pt").write_bytes(b"")
    assert f"{tmp_path}/step_latest/<step>" in refused(tmp_path).message
    step = tmp_path / "step_400"
    step.mkdir()
    folder_with(step, json.dumps(c.QWEN8B))
    assert str(step) in refused(tmp_path).message
    (tmp_path / "step_latest").symlink_to(step)
    message = refused(tmp_path).message
    assert f"{tmp_path}/step_latest" in message and "training run" in message
    assert detect_checkpoint(tmp_path / "step_latest").kind == "drafter"


def test_a_folder_without_a_config_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "weights.bin" in refused(tmp_path).message


def gguf(architecture: str) -> bytes:
    """The head of a GGUF v3 file: magic, version, counts, and its first key."""
    key, value = b"general.architecture", architecture.encode()
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    head += len(key).to_bytes(8, "little") + key + (8).to_bytes(4, "little")
    return head + len(value).to_bytes(8, "little") + value


@pytest.mark.parametrize(
    ("architecture", "reader"),
    [
        ("dflash", "llama.cpp"),
        ("dspark", "old llama.cpp fork"),
        ("dflash-draft", "old llama.cpp fork"),
        ("deepseek4-dspark", "SGLang or ds4"),
        ("llama", "llama.cpp"),
    ],
)
@pytest.mark.parametrize(
    "where", ["model.gguf", "renamed.bin", "folder", "config.json", "folder with config.json"]
)
def test_gguf_is_refused_and_named(
    tmp_path: Path, architecture: str, reader: str, where: str
) -> None:
    name = {"folder": "model.gguf", "folder with config.json": "config.json"}.get(where, where)
    folder_with(tmp_path, gguf(architecture), name)
    message = refused(tmp_path if where.startswith("folder") else tmp_path / name).message
    for word in ("GGUF_UNSUPPORTED", repr(architecture), reader, "safetensors"):
        assert word in message


@pytest.mark.parametrize("data", [b"", b"GGUF", gguf("x")[:40], b"GGUFgeneral.architecture\x08"])
def test_a_cut_gguf_is_still_refused(tmp_path: Path, data: bytes) -> None:
    folder_with(tmp_path, data, "model.gguf")
    assert "GGUF_UNSUPPORTED" in refused(tmp_path / "model.gguf").message
