"""Token and position embeddings, and the head tied to the token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.model.layers import norm
from megatron_rgpt.parallel.registry import Normal, declare

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this: even shards, and shapes that matrix kernels like."""


def padded_vocabulary(vocab_size: int) -> int:
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class Embedding(nn.Module):
    """Learned token and position embeddings: tokens [B, S] to activations [S, B, D]."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        D, init = config.hidden_size, Normal(config.init_method_std)
        self.tokens = nn.Parameter(torch.empty(padded_vocabulary(vocab_size), D))
        self.positions = nn.Parameter(torch.empty(config.seq_length, D))
        declare(self.tokens, init, rows=vocab_size)
        declare(self.positions, init)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        positions_S1D = self.positions[: tokens_BS.shape[1], None]
        return F.embedding(tokens_BS.t(), self.tokens) + positions_S1D


class Head(nn.Module):
    """Final LayerNorm and the logits of the true vocabulary, by the weights of the token embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int, embedding: Embedding) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.norm = norm(config.hidden_size, config.norm_epsilon)
        # registered here too: ZeRO-3 gathers what a module's own forward uses
        self.tokens = embedding.tokens

    def forward(self, x_SBD: torch.Tensor) -> torch.Tensor:
        """Logits [S, B, V]; the padding of the vocabulary is computed and left out."""
        return F.linear(self.norm(x_SBD), self.tokens)[..., : self.vocab_size]


def token_loss_BS(logits_SBV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token in fp32 or better, nats, [B, S]."""
    S, B, V = logits_SBV.shape
    if logits_SBV.dtype in (torch.bfloat16, torch.float16):
        logits_SBV = logits_SBV.float()
    losses = F.cross_entropy(logits_SBV.reshape(S * B, V), labels_BS.t().reshape(S * B), reduction="none")
    return losses.view(S, B).t()
