"""Llama: the plain dense target, with rotary positions and grouped-query attention."""

from typing import ClassVar

from common.models.dense import DenseTarget


class LlamaTarget(DenseTarget):
    """`LlamaForCausalLM` checkpoints."""

    family: ClassVar[str] = "llama"
    qk_norm: ClassVar[bool] = False
