"""Blocks and modulation of RecurrentGPT. Part of an exported model: needs torch alone.

Shapes: B batch, N tokens of this forward, D hidden size, H heads, E head size, T slots attended to.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .cache_recurrent_gpt import Place, RecurrentLayer
from .configuration_recurrent_gpt import RecurrentGPTConfig


class Attention(nn.Module):
    """Causal multi-head self-attention; query, key and value in one product."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        x_BND: torch.Tensor,
        mask: torch.Tensor | None,
        layer: RecurrentLayer | None = None,
        place: Place | None = None,
    ) -> torch.Tensor:
        """`mask` [B, 1, N, T] says who sees whom (or is added to the scores); None: causal."""
        B, N, D = x_BND.shape
        qkv = self.qkv(x_BND).view(B, N, 3, self.heads, D // self.heads)
        q_BHNE, k_BHNE, v_BHNE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if layer is not None:
            k_BHNE, v_BHNE = layer.update(k_BHNE, v_BHNE, place)
        causal = mask is None and N > 1
        y_BHNE = F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE, attn_mask=mask, is_causal=causal)
        return self.out(y_BHNE.transpose(1, 2).reshape(B, N, D))


class MLP(nn.Module):
    """Linear d to 4d, GELU, linear back."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.approximate = {"gelu": "none", "gelu_new": "tanh"}[config.activation_function]
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x_BND: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BND), approximate=self.approximate))


class Block(nn.Module):
    """One pre-norm GPT-2 block, residuals inside."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)
        for layer in (self.attention.out, self.mlp.down):
            layer.initial_scale = 1 / math.sqrt(2 * config.num_hidden_layers)

    def forward(
        self,
        x_BND: torch.Tensor,
        mask: torch.Tensor | None,
        layer: RecurrentLayer | None = None,
        place: Place | None = None,
    ) -> torch.Tensor:
        x_BND = x_BND + self.attention(self.attention_norm(x_BND), mask, layer, place)
        return x_BND + self.mlp(self.mlp_norm(x_BND))


class Projection(nn.Module):
    """W_proj of Eq. 2, d x 2d without bias, as its halves for the state and for the anchor."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.state = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.anchor = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class Gate(nn.Module):
    """g of Eq. 5: sigmoid(f_g([LN(h), LN(h_pre)]) / tau), f_g = linear 2d to d in two halves, SiLU, linear d to d."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        D, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.state_norm = nn.LayerNorm(D, eps=epsilon)
        self.anchor_norm = nn.LayerNorm(D, eps=epsilon)
        self.state = nn.Linear(D, D, bias=False)
        self.anchor = nn.Linear(D, D)
        self.out = nn.Linear(D, D)
        self.out.initial_bias = config.gate_bias


class Modulation(nn.Module):
    """What surrounds the core at each recurrence: projection of the anchor into its input, and the gate (Eq. 2-5).

    The anchor's halves do not change over the loop and are computed once.
    """

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.projection = Projection(config) if config.anchor else None
        self.gate = Gate(config) if config.gate else None

    def anchor_terms(self, h_pre_BND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The anchor's half of the projection and of the gate's first layer, for those that the model has."""
        terms = () if self.projection is None else (self.projection.anchor(h_pre_BND),)
        return terms if self.gate is None else (*terms, self.gate.anchor(self.gate.anchor_norm(h_pre_BND)))

    def core_input(self, h_BND: torch.Tensor, terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """W_proj [h + eps_x, h_pre] (Eq. 2), or h + eps_x without the anchor; no noise unless `eval_noise`."""
        if self.config.eval_noise:
            h_BND = h_BND + self.config.state_noise_std * torch.randn_like(h_BND)
        return h_BND if self.projection is None else self.projection.state(h_BND) + terms[0]

    def update(self, h_BND: torch.Tensor, proposal_BND: torch.Tensor, terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """g * h + (1 - g) * o (Eq. 4), or o without the gate."""
        if self.gate is None:
            return proposal_BND
        logit_BND = self.gate.out(F.silu(self.gate.state(self.gate.state_norm(h_BND)) + terms[-1]))
        if self.config.gate_temperature != 1.0:
            logit_BND = logit_BND / self.config.gate_temperature
        if self.config.eval_noise:
            logit_BND = logit_BND + self.config.gate_noise_std * torch.randn_like(logit_BND)
        # 1 - g as a sigmoid of its own: near a full copy, where most gates are, bf16 would round it away
        return torch.lerp(h_BND, proposal_BND, torch.sigmoid(-logit_BND))
