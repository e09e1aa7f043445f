"""common/tensors.py: round trips and refused lengths."""

import pytest
import torch

from common.errors import InvalidRequest
from common.tensors import from_bytes, to_bytes


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (1,)])
def test_round_trip_keeps_every_value(dtype: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).bfloat16()
    back = from_bytes(to_bytes(values, dtype), dtype, shape)
    assert torch.equal(back.bfloat16(), values)


def test_a_strided_view_travels_row_major() -> None:
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert torch.equal(from_bytes(to_bytes(base.T, "fp32"), "fp32", (4, 3)), base.T)


def test_the_tensor_is_writable_and_owns_its_memory() -> None:
    data = to_bytes(torch.ones(2), "fp32")
    tensor = from_bytes(data, "fp32", (2,))
    tensor.zero_()
    assert torch.equal(from_bytes(data, "fp32", (2,)), torch.ones(2))


@pytest.mark.parametrize("length", [0, 23, 25])
def test_a_wrong_length_is_refused_with_both_sizes(length: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"payload of {length} bytes .*24 bytes"):
        from_bytes(b"\0" * length, "fp32", (2, 3))
