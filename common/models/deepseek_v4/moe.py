"""V4's mixture of experts: routed by token id or by score, beside one shared expert.

The score sqrt(softplus(.)) weights the chosen experts; a bias, where there is one, only chooses.
All experts clamp gate and up. Router in float32. Knows rows, not requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import LoadError
from common.models.deepseek_v4.config import DeepseekV4Config
from common.models.deepseek_v4.weights import DeepseekV4Weights


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
        gate, up = self.gate_up(x).chunk(2, dim=1)
        limit = self.limit
        return self.down(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


class MixtureOfExperts:
    """The feed-forward half of a layer or of a drafter stage."""

    def __init__(
        self, config: DeepseekV4Config, weights: DeepseekV4Weights, prefix: str, by_token_id: bool
    ) -> None:
        """prefix: e.g. `model.layers.0.ffn.`; by_token_id: a hash layer."""
        self.config, own = config, weights.shards
        self.parallel = own.parallel
        num_experts, num_chosen = config.num_experts, config.num_experts_per_token
        self.gate = weights.float32(f"{prefix}gate.weight", (num_experts, config.hidden_size))
        self.expert_ids: Tensor | None = None  # [vocab_size, num_chosen]
        self.bias: Tensor | None = None  # [num_experts]
        if by_token_id:
            name = f"{prefix}gate.tid2eid"
            self.expert_ids = weights.ids(name, (config.vocab_size, num_chosen))
            if self.expert_ids.min() < 0 or self.expert_ids.max() >= num_experts:
                raise LoadError(
                    f"{weights.path}: {name} names experts outside 0..{num_experts - 1}"
                )
        else:
            self.bias = weights.float32(f"{prefix}gate.e_score_correction_bias", (num_experts,))
        self.experts: dict[int, Expert] = {}  # this rank's
        for i in range(num_experts):
            w1, w2, w3 = (f"{prefix}experts.{i}.{part}" for part in ("w1", "w2", "w3"))
            if i in own.experts:
                self.experts[i] = Expert(config, weights, (w1, None), (w3, None), w2)
            else:
                for name in (w1, w2, w3):
                    weights.leave(name)
        gate_up, down = f"{prefix}shared_experts.gate_up_proj", f"{prefix}shared_experts.down_proj"
        self.shared: Expert | None = None
        if own.shared_channels:
            self.shared = Expert(
                config, weights, (gate_up, 0), (gate_up, 1), down, own.shared_channels
            )
        else:
            for name, shard in ((gate_up, 0), (gate_up, 1), (down, None)):
                weights.leave(name, shard)

    def __call__(self, x: Tensor, token_ids: Tensor, apart: bool) -> Tensor:
        """x [T, d], token_ids [T] -> [T, d].

        apart: every expert runs over all rows, so that no row's result depends on how many others
        chose the same expert; rows that did not choose it get weight zero.
        """
        chosen, weights = self.route(x, token_ids)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for i in chosen.unique().tolist():
            if i not in self.experts:
                continue
            own = torch.where(chosen == i, weights, 0).sum(1, keepdim=True)
            if apart:
                mixed += own * self.experts[i](x).float()
            else:
                rows = own.squeeze(1).nonzero().squeeze(1)
                mixed.index_add_(0, rows, own[rows] * self.experts[i](x[rows]).float())
        if self.shared is not None:
            mixed += self.shared(x).float()
        return self.parallel.sum(mixed, in_rank_order=apart).to(x.dtype)

    def route(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, num_chosen] int64 and their weights, float32."""
        scores = F.softplus(F.linear(x.float(), self.gate)).sqrt()
        if self.expert_ids is not None:
            chosen = self.expert_ids[token_ids]
        else:
            assert self.bias is not None
            chosen = (scores + self.bias).topk(self.config.num_experts_per_token, dim=1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        return chosen, weights * self.config.routed_scaling_factor
