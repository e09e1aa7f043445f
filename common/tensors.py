"""Tensors as (dtype name, shape, bytes) and back, checked. Knows no protobuf and no field meanings.

Row-major, little endian. The names are the wire's: "bf16" and "fp32".
"""

import math

import torch

from common.errors import InvalidRequest

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def itemsize(dtype: str) -> int:
    """Bytes per value of a wire dtype."""
    return DTYPES[dtype].itemsize


def to_bytes(tensor: torch.Tensor, dtype: str) -> bytes:
    """The values of `tensor`, converted to `dtype`, copied from its device once."""
    flat = tensor.detach().to(device="cpu", dtype=DTYPES[dtype]).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor of its own memory (the bytes of a message are read-only).

    Raises InvalidRequest when the length does not fit dtype and shape.
    """
    wanted = math.prod(shape) * itemsize(dtype)
    if len(data) != wanted:
        raise InvalidRequest(
            f"payload of {len(data)} bytes is not {shape} values of {dtype} ({wanted} bytes)"
        )
    if wanted == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape)
