"""Multiplications that torch has no operator for: reference in torch, Triton on CUDA."""
