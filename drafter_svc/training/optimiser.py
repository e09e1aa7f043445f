"""The trainer's optimiser: Muon for the layers' matrices, AdamW for tables, norms and heads.

Muon (Jordan et al. 2024) reached the same expected acceptance in about 0.7 of AdamW's steps here.
Its updates are scaled to AdamW's size, so that one learning rate serves both.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter


class Optimiser:
    """Both optimisers as one. `markov_rate`: factor on the Markov tables, whose rows are rare."""

    def __init__(self, weights: Mapping[str, Parameter], markov_rate: float) -> None:
        self._weights = weights
        matrices = [w for name, w in weights.items() if _is_matrix(name, w)]
        others = [
            {"params": [w], "scale": markov_rate if "markov" in name else 1.0}
            for name, w in weights.items()
            if not _is_matrix(name, w)
        ]
        self._muon = torch.optim.Muon(
            matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(
            others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; gradients are cleared after it."""
        for optimiser in (self._muon, self._adamw):
            for group in optimiser.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            optimiser.step()
            optimiser.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Moments by weight name, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            for key, value in self._of(name, weight).state[weight].items():
                if key != "step":
                    tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Takes back what `state` gave after `num_steps` updates."""
        for name, weight in self._weights.items():
            if _is_matrix(name, weight):
                self._muon.state[weight] = {
                    "momentum_buffer": tensors[f"momentum_buffer.{name}"].clone()
                }
            else:
                self._adamw.state[weight] = {
                    "step": torch.tensor(float(num_steps)),
                    "exp_avg": tensors[f"exp_avg.{name}"].clone(),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone(),
                }

    def _of(self, name: str, weight: Parameter) -> torch.optim.Optimizer:
        return self._muon if _is_matrix(name, weight) else self._adamw


def _is_matrix(name: str, weight: Parameter) -> bool:
    """Hidden-to-hidden weights, which Muon is made for."""
    return weight.ndim == 2 and name.startswith(("layers.", "fc."))
