"""The pre-norm GPT-2 block: LayerNorm, causal attention, residual; LayerNorm, MLP, residual (paper §3.1).

Activations are [S, B, D]: sequence first, so that a shard of the sequence is contiguous. Under tensor parallelism the
residual stream is such a shard, [S/tp, B, D], heads and MLP columns are split over ranks, and attention sees all of S.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.parallel.layers import ColumnParallelLinear, RowParallelLinear, norm
from megatron_rgpt.parallel.mesh import Group


class Attention(nn.Module):
    """Causal multi-head self-attention; query, key and value in one product, in this order of outputs."""

    def __init__(self, config: ModelConfig, tp: Group) -> None:
        super().__init__()
        D, std = config.hidden_size, config.init_method_std
        self.heads = config.num_attention_heads // tp.size
        self.qkv = ColumnParallelLinear(D, 3 * D, std, tp, parts=3)
        self.out = RowParallelLinear(D, D, _residual_std(config), tp)

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x_sBD).unflatten(-1, (3, self.heads, -1))
        q_BHSE, k_BHSE, v_BHSE = qkv.permute(2, 1, 3, 0, 4).unbind(0)
        y_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True)
        return self.out(y_BHSE.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    """Linear d to 4d, GELU, linear back."""

    def __init__(self, config: ModelConfig, tp: Group) -> None:
        super().__init__()
        D = config.hidden_size
        self.approximate = {"exact": "none", "tanh": "tanh"}[config.gelu]
        self.up = ColumnParallelLinear(D, 4 * D, config.init_method_std, tp)
        self.down = RowParallelLinear(4 * D, D, _residual_std(config), tp)

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_sBD), approximate=self.approximate))


class Block(nn.Module):
    """One transformer block, residuals inside."""

    def __init__(self, config: ModelConfig, tp: Group) -> None:
        super().__init__()
        self.attention_norm = norm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, tp)
        self.mlp_norm = norm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config, tp)

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        x_sBD = x_sBD + self.attention(self.attention_norm(x_sBD))
        return x_sBD + self.mlp(self.mlp_norm(x_sBD))


def _residual_std(config: ModelConfig) -> float:
    # GPT-2's scaling by the number of residual additions a token meets, so it equals that of the dense twin
    executions = config.layout.block_executions(config.layout.recurrences)
    return config.init_method_std / math.sqrt(2 * executions)
