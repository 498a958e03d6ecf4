"""The input of one micro-step on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_rgpt.randomness import Noise


class MicroBatch(NamedTuple):
    """b samples of S tokens with what the model needs of them."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    noise: Noise | None
    """None: noise is off."""
    positions_BS: torch.Tensor | None = None
    """None: 0..S-1."""
    weights_BS: torch.Tensor | None = None
    """What each token's loss counts; None: 1. Their mean over the global batch is 1."""

    def on_shard(self, part: int, parts: int) -> MicroBatch:
        """The same with the noise of one of `parts` shards of the sequence."""
        if self.noise is None:
            return self
        return self._replace(noise=replace(self.noise, part=part, parts=parts))
