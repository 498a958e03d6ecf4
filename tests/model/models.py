"""Small models and tokens for tests."""

from __future__ import annotations

import torch

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.recurrent import RecurrentTransformer, build_model

VOCABULARY = 77


def small_config(layout: str = "1+2x3+1", **changes) -> ModelConfig:
    """d 32, 4 heads, S 13: no power of two, an odd vocabulary."""
    values = {"hidden_size": 32, "num_attention_heads": 4, "seq_length": 13, "gate_bias": 0.0, **changes}
    return ModelConfig(layout=Layout.parse(layout), **values)


def small_model(layout: str = "1+2x3+1", *, seed: int = 1, double: bool = False, **changes) -> RecurrentTransformer:
    model, _ = build_model(small_config(layout, **changes), VOCABULARY, seed)
    return model.double() if double else model


def tokens_BS(samples: int = 3, length: int = 13) -> torch.Tensor:
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(7))
