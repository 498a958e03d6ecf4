"""Sequence-parallel collectives that autograd knows: activations are [S, B, D], and a rank's shard is [S/tp, B, D].

Gathering forward is summing-and-scattering backward, and the other way round. A block gathers twice and scatters twice
in each direction, so a forward and backward pass of one block moves, per rank and micro-batch,

    8 (tp - 1)/tp · S · B · D · bytes per value

(11 with recomputation, which stops before a block's last scatter). Embedding and head move 2 such tensors each, and
the loss all-reduces 3 · S · B values of fp32. The modulation works on shards and moves none. Once an iteration (under
ZeRO 2 and 3, once a micro-batch) the gradients of replicated parameters are all-reduced: modulation, LayerNorms,
positions and the biases of row-parallel layers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rgpt.parallel.mesh import Group


def gather_sequence(x_sBD: torch.Tensor, tp: Group) -> torch.Tensor:
    """The whole sequence from its shards: [S/tp, B, D] to [S, B, D]. Backward: sum over ranks, keep this shard."""
    return x_sBD if tp.size == 1 else _Gather.apply(x_sBD, tp)


def scatter_sum_sequence(x_SBD: torch.Tensor, tp: Group) -> torch.Tensor:
    """The sum over ranks, of which each keeps its shard: [S, B, D] to [S/tp, B, D]. Backward: gather."""
    return x_SBD if tp.size == 1 else _ScatterSum.apply(x_SBD, tp)


def sequence_shard(length: int, tp: Group) -> slice:
    """The positions of a sequence of this length that this rank holds."""
    size = length // tp.size
    return slice(tp.rank * size, (tp.rank + 1) * size)


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate along dimension 0 over ranks."""
    whole = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group.handle)
    return whole


def reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over ranks; keep this rank's part of dimension 0."""
    part = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group.handle)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_sBD: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return all_gather(x_sBD, tp)

    @staticmethod
    def backward(ctx, grad_SBD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(grad_SBD, ctx.tp), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBD: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return reduce_scatter(x_SBD, tp)

    @staticmethod
    def backward(ctx, grad_sBD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(grad_sBD, ctx.tp), None
