"""What makes one core act as many layers: the projection of the anchor into its input, and the elementwise gate.

Both are linear in [state, anchor], so each is held as its two halves: `W [h, a] = W_state h + W_anchor a`. The anchor
does not change over the loop, so its half can be computed once per forward: 6d² FLOPs a step instead of 10d².
All of it is local to a token: under tensor parallelism it works on the rank's shard of the sequence and communicates
no activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.parallel.layers import linear, norm


class Projection(nn.Module):
    """W_proj of Eq. 2, d x 2d without bias, as two halves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, std = config.hidden_size, config.init_method_std
        self.state = linear(D, D, std, bias=None)
        self.anchor = linear(D, D, std, bias=None)

    def forward(self, h_sBD: torch.Tensor, anchor_term_sBD: torch.Tensor) -> torch.Tensor:
        return self.state(h_sBD) + anchor_term_sBD


class Gate(nn.Module):
    """The gate of Eq. 5, g = sigmoid(f_g([LN(h), LN(h_pre)]) / tau + noise), f_g = linear 2d to d, SiLU, linear d to d.

    It returns what is written, 1 - g = sigmoid(-logit): near a copy, where training starts, bf16 would round g itself
    to 1 (from a logit of 6.25 on), and core and gate would get no gradient.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, std = config.hidden_size, config.init_method_std
        self.temperature = config.gate_temperature
        self.state_norm = norm(D, config.norm_epsilon)
        self.anchor_norm = norm(D, config.norm_epsilon)
        self.state = linear(D, D, std, bias=None)
        self.anchor = linear(D, D, std)
        self.out = linear(D, D, std, bias=config.gate_bias)

    def anchor_term(self, h_pre_sBD: torch.Tensor) -> torch.Tensor:
        """The anchor's half of the first layer, with its bias."""
        return self.anchor(self.anchor_norm(h_pre_sBD))

    def forward(
        self, h_sBD: torch.Tensor, anchor_term_sBD: torch.Tensor, noise_sBD: torch.Tensor | None
    ) -> torch.Tensor:
        logit_sBD = self.out(F.silu(self.state(self.state_norm(h_sBD)) + anchor_term_sBD))
        if self.temperature != 1.0:
            logit_sBD = logit_sBD / self.temperature
        if noise_sBD is not None:
            logit_sBD = logit_sBD + noise_sBD
        return torch.sigmoid(-logit_sBD)
