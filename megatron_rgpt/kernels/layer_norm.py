"""LayerNorm over the last dimension: apex's fused one on a GPU that has it, else torch's.

`apex` on PyPI is another package, so NVIDIA's is known by `apex.normalization`, and it is never required.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


@functools.cache
def layer_norm_implementation() -> str:
    """`apex` or `torch`: what `layer_norm` builds on this machine."""
    if not torch.cuda.is_available():
        return "torch"
    try:
        from apex.normalization import FusedLayerNorm  # noqa: F401
    except ImportError:
        return "torch"
    return "apex"


def layer_norm(size: int, eps: float) -> nn.Module:
    """A LayerNorm with affine weight and bias over `size` features."""
    if layer_norm_implementation() == "apex":
        from apex.normalization import FusedLayerNorm

        return FusedLayerNorm(size, eps=eps)
    return nn.LayerNorm(size, eps=eps)
