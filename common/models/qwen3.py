"""Qwen3 dense: Llama's shape with an RMSNorm over each head of q and k before the rotation."""

from typing import ClassVar

from common.models.dense import DenseTarget


class Qwen3Target(DenseTarget):
    """`Qwen3ForCausalLM` checkpoints."""

    family: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True
