"""V4's experts: one alone, and a rank's routed ones, called one by one or all in one go."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.kernels.quant_matmul import plan_of, quant_matmul
from common.loading.block_quant import QuantWeight, joined
from common.models.deepseek_v4.config import DeepseekV4Config
from common.models.deepseek_v4.weights import DeepseekV4Weights
from common.nn.quant_linear import QuantLinear


class Expert:
    """down(silu(min(gate, limit)) * clip(up, ±limit))."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: DeepseekV4Weights,
        gate: tuple[str, int | None],
        up: tuple[str, int | None],
        down: str,
        channels: range | None = None,
    ) -> None:
        """gate, up, down: module names; gate and up with their part of a stacked parameter.

        channels: those of the intermediate layer that are needed; None: all.
        """
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_up = weights.linear(d, (*gate, inner), (*up, inner), only_rows=channels)
        self.down = weights.linear(inner, (down, None, d), only_cols=channels)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, d] -> [rows, d]."""
        return self.down(_activated(self.gate_up(x), self.limit))


class RoutedExperts(Protocol):
    """A rank's routed experts, some of the layer's, by number."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, apart: bool) -> Tensor:
        """x [T, d], chosen [T, n] expert numbers, weights [T, n] -> float32 [T, d].

        The weighted sum over those of the chosen experts that are here. apart: no row's result may
        depend on how many others chose the same expert.
        """


class ExpertByExpert:
    """One multiplication after another."""

    def __init__(self, experts: dict[int, Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, apart: bool) -> Tensor:
        """See RoutedExperts. apart: each runs over all rows; those not its own get weight zero."""
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for i in chosen.unique().tolist():
            if i not in self._experts:
                continue
            own = torch.where(chosen == i, weights, 0).sum(1, keepdim=True)
            if apart:
                mixed += own * self._experts[i](x).float()
            else:
                rows = own.squeeze(1).nonzero().squeeze(1)
                mixed.index_add_(0, rows, own[rows] * self._experts[i](x[rows]).float())
        return mixed


class StackedExperts:
    """Block-quantised experts with successive numbers, in two multiplications whatever is chosen.

    Nothing is copied to the host to find out which. On CUDA each pair of row and expert is computed
    on its own, in tiles whose size follows from the number of rows alone: rows are always apart.
    """

    def __init__(self, first: int, gate_up: QuantWeight, down: QuantWeight, limit: float) -> None:
        """first: the lowest number."""
        self._first, self._gate_up, self._down, self._limit = first, gate_up, down, limit

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, apart: bool) -> Tensor:
        """See RoutedExperts."""
        plan = plan_of((chosen - self._first).flatten(), len(self._down.codes))
        hidden = _activated(quant_matmul(x, self._gate_up, plan), self._limit)
        out = quant_matmul(hidden, self._down, plan).view(*chosen.shape, -1)
        return (out.float() * weights[:, :, None]).sum(1)


def routed_experts(experts: dict[int, Expert]) -> RoutedExperts:
    """Stacked where all are kept quantised in one format."""
    gate_up = _kept([expert.gate_up for expert in experts.values()])
    down = _kept([expert.down for expert in experts.values()])
    if gate_up is None or down is None:
        return ExpertByExpert(experts)
    first = min(experts)
    assert list(experts) == list(range(first, first + len(experts))), list(experts)
    return StackedExperts(first, gate_up, down, experts[first].limit)


def _kept(layers: list[object]) -> QuantWeight | None:
    kept = [layer.weight for layer in layers if isinstance(layer, QuantLinear)]
    if not kept or len(kept) < len(layers) or len({weight.format for weight in kept}) > 1:
        return None
    return joined(kept, 0)


def _activated(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
