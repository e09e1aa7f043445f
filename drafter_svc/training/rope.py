"""Rotary position embedding for the training code: tables and rotation, Hugging Face's half split.

Knows plain RoPE only; a target with a scaled RoPE needs a table of its own.
"""

import torch


def rotary_tables(
    max_len: int, head_dim: int, theta: float, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_len, head_dim], computed in float32 and rounded to `dtype` once."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the last dimension of x; cos and sin broadcast against it."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
