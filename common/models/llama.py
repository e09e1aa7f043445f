"""Llama: the plain dense target. Rotary positions (llama3 scaling included), grouped-query attention."""

from typing import ClassVar

from common.models.dense import DenseTarget


class LlamaTarget(DenseTarget):
    """`LlamaForCausalLM` checkpoints."""

    family: ClassVar[str] = "llama"
    qk_norm: ClassVar[bool] = False
