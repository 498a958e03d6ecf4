"""Cross entropy over a vocabulary that is sharded over tensor-parallel ranks; the logits are never gathered.

Ranks exchange the largest logit, the sum of exponentials and the label's logit of each token: three numbers of fp32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rgpt.parallel.mesh import Group


def vocab_parallel_cross_entropy(
    logits_SBV: torch.Tensor, labels_SB: torch.Tensor, vocab_size: int, tp: Group
) -> torch.Tensor:
    """Loss of each token in nats, [S, B], the same on every rank; fp32, or fp64 for fp64 logits.

    `logits_SBV` is this rank's shard of the padded vocabulary, whose columns at or beyond `vocab_size` are ignored; a
    shard may hold nothing else.
    """
    return _CrossEntropy.apply(logits_SBV, labels_SB, vocab_size, tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_SBV: torch.Tensor, labels_SB: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
        columns = logits_SBV.shape[-1]
        first = tp.rank * columns
        valid = min(max(vocab_size - first, 0), columns)
        dtype = torch.promote_types(logits_SBV.dtype, torch.float32)

        if valid:
            largest_SB = logits_SBV[..., :valid].amax(dim=-1).to(dtype)
        else:
            largest_SB = logits_SBV.new_full(labels_SB.shape, -torch.inf, dtype=dtype)
        if tp.size > 1:
            dist.all_reduce(largest_SB, op=dist.ReduceOp.MAX, group=tp.handle)

        exponentials_SBV = logits_SBV.to(dtype) - largest_SB[..., None]
        local_SB = labels_SB - first
        here_SB = (local_SB >= 0) & (local_SB < valid)
        column_SB1 = local_SB.clamp(0, max(valid - 1, 0))[..., None]
        label_SB = torch.where(here_SB, exponentials_SBV.gather(-1, column_SB1)[..., 0], 0.0)

        exponentials_SBV.exp_()
        exponentials_SBV[..., valid:] = 0.0
        sums_2SB = torch.stack([exponentials_SBV.sum(dim=-1), label_SB])
        if tp.size > 1:
            dist.all_reduce(sums_2SB, group=tp.handle)
        total_SB, label_SB = sums_2SB

        softmax_SBV = exponentials_SBV.div_(total_SB[..., None])
        ctx.save_for_backward(softmax_SBV, column_SB1, here_SB)
        ctx.dtype = logits_SBV.dtype
        return total_SB.log() - label_SB

    @staticmethod
    def backward(ctx, grad_SB: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax_SBV, column_SB1, here_SB = ctx.saved_tensors
        # in place: this is the last use of the softmax, as large as the logits
        grad_SBV = softmax_SBV.mul_(grad_SB[..., None])
        grad_SBV.scatter_add_(-1, column_SB1, torch.where(here_SB, -grad_SB, 0.0)[..., None])
        return grad_SBV.to(ctx.dtype), None, None, None
