"""Layers whose parameters are declared, and which work on one rank or on a tensor-parallel group.

Between layers the residual stream is sharded along the sequence, [S/tp, B, D]. A column-parallel layer gathers the
sequence and computes its share of the outputs; a row-parallel one sums shares and leaves each rank its shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_rgpt.kernels.layer_norm import layer_norm
from megatron_rgpt.parallel.collectives import gather_sequence, scatter_sum_sequence, sequence_shard
from megatron_rgpt.parallel.mesh import Group
from megatron_rgpt.parallel.registry import Constant, Normal, Shard, declare

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this per rank: even shards, and shapes that matrix kernels like."""


def padded_vocabulary(vocab_size: int, tensor_parallel_size: int = 1) -> int:
    multiple = VOCABULARY_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def linear(inputs: int, outputs: int, std: float, *, bias: float | None = 0.0) -> nn.Linear:
    """A replicated linear layer, for shards of the sequence: weights N(0, std²), bias at `bias`; None: no bias."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias is not None)
    declare(layer.weight, Normal(std))
    if bias is not None:
        declare(layer.bias, Constant(bias))
    return layer


def norm(size: int, eps: float) -> nn.Module:
    """A LayerNorm that starts as the plain normalisation."""
    layer = layer_norm(size, eps)
    declare(layer.weight, Constant(1.0))
    declare(layer.bias, Constant(0.0))
    return layer


class ColumnParallelLinear(nn.Module):
    """[S/tp, B, inputs] to [S, B, outputs/tp]. `parts` outputs lie side by side, such as query, key and value."""

    def __init__(self, inputs: int, outputs: int, std: float, tp: Group, *, parts: int = 1) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(outputs // tp.size, inputs))
        self.bias = nn.Parameter(torch.empty(outputs // tp.size))
        declare(self.weight, Normal(std), shard=Shard(0, parts))
        declare(self.bias, Constant(0.0), shard=Shard(0, parts))

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        return F.linear(gather_sequence(x_sBD, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """[S, B, inputs/tp] to [S/tp, B, outputs]; the bias is added to the sum, on each rank's shard."""

    def __init__(self, inputs: int, outputs: int, std: float, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size))
        self.bias = nn.Parameter(torch.empty(outputs))
        declare(self.weight, Normal(std), shard=Shard(1))
        declare(self.bias, Constant(0.0))

    def forward(self, x_SBD: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.linear(x_SBD, self.weight, self.bias)
        return scatter_sum_sequence(F.linear(x_SBD, self.weight), self.tp) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Learned token and position embeddings: tokens [B, S] to [S/tp, B, D]. A rank holds some rows of the tokens."""

    def __init__(self, vocab_size: int, length: int, width: int, std: float, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.tokens = nn.Parameter(torch.empty(padded_vocabulary(vocab_size, tp.size) // tp.size, width))
        self.positions = nn.Parameter(torch.empty(length, width))
        declare(self.tokens, Normal(std), shard=Shard(0), rows=vocab_size)
        declare(self.positions, Normal(std))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Positions are 0..S-1 unless given."""
        shard = sequence_shard(tokens_BS.shape[1], self.tp)
        if positions_BS is None:
            positions_sBD = self.positions[shard][:, None]
        else:
            positions_sBD = F.embedding(positions_BS.t()[shard], self.positions)
        if self.tp.size == 1:
            return F.embedding(tokens_BS.t(), self.tokens) + positions_sBD
        rows = self.tokens.shape[0]
        local_SB = tokens_BS.t() - self.tp.rank * rows
        here_SB1 = ((local_SB >= 0) & (local_SB < rows))[..., None]
        partial_SBD = torch.where(here_SB1, F.embedding(local_SB.clamp(0, rows - 1), self.tokens), 0.0)
        return scatter_sum_sequence(partial_SBD, self.tp) + positions_sBD
