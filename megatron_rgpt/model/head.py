"""The head: final LayerNorm, logits by the weights of the token embedding, and the loss of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.parallel.collectives import gather_sequence
from megatron_rgpt.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_rgpt.parallel.layers import VocabParallelEmbedding, norm
from megatron_rgpt.parallel.mesh import Group


class Head(nn.Module):
    """From the last state [S/tp, B, D] to losses, or on one rank to logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, embedding: VocabParallelEmbedding, tp: Group) -> None:
        super().__init__()
        self.vocab_size, self.tp = vocab_size, tp
        self.norm = norm(config.hidden_size, config.norm_epsilon)
        # registered here too: ZeRO-3 gathers what a module's own forward uses
        self.tokens = embedding.tokens

    def forward(self, x_sBD: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Loss of each token [B, S] in nats, fp32 or better; without labels the logits [B, S, V]."""
        logits_SBV = F.linear(gather_sequence(self.norm(x_sBD), self.tp), self.tokens)
        if labels_BS is None:
            assert self.tp.size == 1, "logits are never gathered over tensor-parallel ranks"
            return logits_SBV[..., : self.vocab_size].transpose(0, 1)
        return vocab_parallel_cross_entropy(logits_SBV, labels_BS.t(), self.vocab_size, self.tp).t()


def mean_loss(losses_BS: torch.Tensor, weights_BS: torch.Tensor | None) -> torch.Tensor:
    """Mean over tokens, each counted as its weight says."""
    return losses_BS.mean() if weights_BS is None else (losses_BS * weights_BS).mean()
