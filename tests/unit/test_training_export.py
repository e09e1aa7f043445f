"""What training exports, the service computes: same logits and confidences from the same taps."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.models.dspark_qwen3 import load_drafter
from common.testing.tiny import tiny_target
from drafter_svc.training import report
from drafter_svc.training.data import draft_vocabulary
from drafter_svc.training.export import export
from drafter_svc.training.model import Blocks
from drafter_svc.training.settings import Settings
from drafter_svc.training.start import drafter_config, new_drafter, target_tensors


def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A drafter with every weight away from its start, in a folder, and its target's folder."""
    folder = tiny_target(tmp_path / "target", layers=4, vocab=64)
    settings = Settings(
        target=folder,
        drafter_taps=[0, 2],
        num_kv_heads=2,
        intermediate_size=24,
        draft_vocab_size=20,
        block_size=4,
        markov_rank=6,
        mask_token_id=3,
    )
    counts = torch.arange(64).flip(0) ** 2
    d2t = draft_vocabulary(counts, 20, required=[50])
    config, target = drafter_config(settings), target_tensors(folder)
    sample = torch.randn(50, 2 * config.hidden_size)
    drafter = new_drafter(config, target, d2t, sample, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return export(drafter, tmp_path / "drafter"), folder


@torch.no_grad()
def test_exported_drafter_computes_the_same_in_the_service(tmp_path: Path) -> None:
    path, folder = exported(tmp_path)
    trained = report.load_drafter(path, target_tensors(folder))
    served, load_report = load_drafter(path, folder, torch.float32)
    assert not load_report.ignored
    torch.manual_seed(2)
    taps = torch.randn(9, 2 * trained.config.hidden_size)
    tokens = torch.randint(0, 64, (1, 5))
    logits, confidence = trained(Blocks(taps, [9], [1], torch.tensor([9]), tokens))

    kv = served.new_kv(num_blocks=4, kv_block_size=4)
    served.ingest(served.project(taps), kv, torch.arange(9), torch.arange(9))
    hidden, base = served.block(tokens[:, 0], torch.tensor([9]), 4, kv, [[0, 1, 2, 3]])
    state = served.start_state(1)
    for k in range(4):
        bias, state = served.bias(tokens[:, k], hidden[:, k], state)
        assert bias is not None
        torch.testing.assert_close(base[0, k] + bias[0], logits[0, k], atol=2e-3, rtol=2e-3)
        score = served.confidence(hidden[:, k], tokens[:, k])
        assert score is not None
        torch.testing.assert_close(score[0], confidence[0, k], atol=2e-3, rtol=2e-3)
    assert served.to_target_ids(torch.arange(20)).tolist() == trained.d2t.tolist()


def test_files_are_bf16_with_offsets_and_without_the_embedding(tmp_path: Path) -> None:
    path, _ = exported(tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert "embed_tokens.weight" not in tensors
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int64
    assert set(kinds.values()) == {torch.bfloat16}
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["draft_vocab_size"]) == (4, 20)
    offsets = tensors["d2t"]
    assert 50 in (torch.arange(20) + offsets).tolist()
