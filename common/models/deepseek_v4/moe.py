"""V4's mixture of experts: routed by token id or by score, beside one shared expert.

The score sqrt(softplus(.)) weights the chosen experts; a bias, where there is one, only chooses.
All experts clamp gate and up. Router in float32. Knows rows, not requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import LoadError
from common.models.deepseek_v4.config import DeepseekV4Config
from common.models.deepseek_v4.experts import Expert, routed_experts
from common.models.deepseek_v4.weights import DeepseekV4Weights


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
        experts: dict[int, Expert] = {}  # this rank's
        for i in range(num_experts):
            w1, w2, w3 = (f"{prefix}experts.{i}.{part}" for part in ("w1", "w2", "w3"))
            if i in own.experts:
                experts[i] = Expert(config, weights, (w1, None), (w3, None), w2)
            else:
                for name in (w1, w2, w3):
                    weights.leave(name)
        self.experts = routed_experts(experts)
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

        apart: no row's result may depend on the other rows, nor on its place among them.
        """
        mixed = self.experts(x, *self._route(x, token_ids, apart), apart)
        if self.shared is not None:
            mixed += self.shared(x).float()
        return self.parallel.sum(mixed, in_rank_order=apart).to(x.dtype)

    def _route(self, x: Tensor, token_ids: Tensor, apart: bool) -> tuple[Tensor, Tensor]:
        """Experts [T, num_chosen] int64 and their weights, float32."""
        raw = F.linear(x.float(), self.gate)
        # On CPU what is left over behind the last full vector is computed in another way.
        parts = raw.split(1) if apart else [raw]
        scores = torch.cat([F.softplus(part) for part in parts]).sqrt()
        if self.expert_ids is not None:
            chosen = self.expert_ids[token_ids]
        else:
            assert self.bias is not None
            chosen = (scores + self.bias).topk(self.config.num_experts_per_token, dim=1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        return chosen, weights * self.config.routed_scaling_factor
