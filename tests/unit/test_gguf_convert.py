"""The GGUF converter on a tiny file written here: names, q/k order, tokenizer, atomic reuse."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from common.errors import LoadError
from common.loading.gguf_convert import convert, hf_name, unpermute

D, HEADS, KV_HEADS, FFN, LAYERS = 32, 2, 1, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o"]


def llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q_proj and k_proj, row by row."""
    head_dim = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for i in range(head_dim // 2):
            rows += [head * head_dim + i, head * head_dim + head_dim // 2 + i]
    return weight[rows]


def vocabulary() -> list[str]:
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    return [*SPECIAL, *letters, "he", "ll", "hell", "hello"]


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A float32 Llama with a byte-level tokenizer; returns the weights under GGUF names."""
    rng = np.random.default_rng(0)
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd.weight": (len(tokens), D), "output_norm.weight": (D,)}
    for i in range(LAYERS):
        kv = KV_HEADS * D // HEADS
        shapes |= {
            f"blk.{i}.attn_norm.weight": (D,),
            f"blk.{i}.attn_q.weight": (D, D),
            f"blk.{i}.attn_k.weight": (kv, D),
            f"blk.{i}.attn_v.weight": (kv, D),
            f"blk.{i}.attn_output.weight": (D, D),
            f"blk.{i}.ffn_norm.weight": (D,),
            f"blk.{i}.ffn_gate.weight": (FFN, D),
            f"blk.{i}.ffn_up.weight": (FFN, D),
            f"blk.{i}.ffn_down.weight": (D, FFN),
        }
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, llama_cpp_order(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_weights_config_and_tokenizer(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[int, int]] = []
    out = convert(
        tmp_path / "tiny.gguf", tmp_path / "out", lambda done, total, _: seen.append((done, total))
    )
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == {hf_name(name) for name in weights}
    for name, weight in weights.items():
        assert torch.equal(tensors[hf_name(name)], torch.from_numpy(weight).bfloat16()), name
    assert seen[-1] == (len(weights), len(weights))
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (32, 1, 16)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (12345.0, 1e-5)
    assert config["tie_word_embeddings"] is True
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>hello 42<|im_end|>", add_special_tokens=False)
    # Digits stand alone; special tokens are whole.
    assert encoded.tokens == ["<|im_start|>", "hello", "Ġ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "hello 42"


def test_unpermute_undoes_llama_cpp() -> None:
    weight = np.arange(24 * 2, dtype=np.float32).reshape(24, 2)
    assert not np.array_equal(llama_cpp_order(weight, 3), weight)
    assert np.array_equal(unpermute(llama_cpp_order(weight, 3), 3), weight)


def test_complete_result_is_reused_and_another_source_replaces_it(tmp_path: Path) -> None:
    source, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(source)
    first = (convert(source, out) / "model.safetensors").stat().st_mtime_ns
    assert (convert(source, out) / "model.safetensors").stat().st_mtime_ns == first
    (out / "source.json").unlink()  # as after a crash of an older version
    assert (convert(source, out) / "model.safetensors").stat().st_mtime_ns != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)

    def stop(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(LoadError, match=r"bad\.gguf is not a readable GGUF"):
        convert(tmp_path / "bad.gguf", tmp_path / "out")
    with pytest.raises(LoadError, match="cannot read the GGUF file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")
    write_gguf(tmp_path / "other.gguf", "gemma")
    with pytest.raises(LoadError, match=r"lacks the field|architecture .gemma."):
        convert(tmp_path / "other.gguf", tmp_path / "out")
    with pytest.raises(LoadError, match=r"rope_freqs\.weight"):
        hf_name("rope_freqs.weight")
