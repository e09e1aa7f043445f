"""On CUDA the same code gives what the CPU gives."""

from pathlib import Path

import pytest
import torch

from common.models.dspark_qwen3 import load_drafter
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.testing.numeric import max_difference
from common.testing.tiny import tiny_drafter, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TABLES = [[3, 0, 5], [2, 1, 7]]


def draft_after_prefill(
    target_path: Path, drafter_path: Path, dtype: torch.dtype, device: str, numerics: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefills two requests, ingests their taps, drafts one block: target and draft logits."""
    target, _ = load_target(target_path, dtype, device, numerics)  # type: ignore[arg-type]
    drafter, _ = load_drafter(drafter_path, target_path, dtype, device)
    kv, draft_kv = target.new_kv(8, 4), drafter.new_kv(8, 4)
    lengths = [7, 4]
    segments = [Segment(0, 7, 7, TABLES[0]), Segment(7, 4, 4, TABLES[1])]
    slots = torch.tensor(
        [s for n, t in zip(lengths, TABLES, strict=True) for s in kv.slots_of(t, 0, n)]
    ).to(device)
    positions = torch.tensor([*range(7), *range(4)]).to(device)
    token_ids = torch.arange(11, device=device)
    batch = AttentionBatch(segments, slots, positions)
    hidden, taps = target.forward(token_ids, kv, batch, drafter.config.target_layer_ids)
    assert taps is not None
    drafter.ingest(drafter.project(taps), draft_kv, slots, positions)
    anchors = torch.tensor([1, 2], device=device)
    rows, base = drafter.block(anchors, torch.tensor(lengths, device=device), 4, draft_kv, TABLES)
    bias, _ = drafter.bias(anchors, rows[:, 0], drafter.start_state(2))
    assert bias is not None
    return target.logits(hidden).cpu(), (base[:, 0] + bias).cpu()


@pytest.mark.parametrize("numerics", ["fast", "batch_invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(dtype: torch.dtype, numerics: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "qwen3", layers=3)
    drafter = tiny_drafter(tmp_path / "drafter", target, "rnn")
    cpu = draft_after_prefill(target, drafter, torch.float32, "cpu", "fast")
    cuda = draft_after_prefill(target, drafter, dtype, "cuda", numerics)
    tolerance = 1e-3 if dtype == torch.float32 else 0.3
    for found, expected in zip(cuda, cpu, strict=True):
        assert max_difference(found, expected) < tolerance
