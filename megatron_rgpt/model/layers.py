"""Linear layers and LayerNorms whose parameters are declared."""

from __future__ import annotations

from torch import nn

from megatron_rgpt.kernels.layer_norm import layer_norm
from megatron_rgpt.parallel.registry import Constant, Normal, declare


def linear(inputs: int, outputs: int, std: float, *, bias: float | None = 0.0) -> nn.Linear:
    """A linear layer with weights N(0, std²) and a bias that starts at `bias`; None: no bias."""
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
