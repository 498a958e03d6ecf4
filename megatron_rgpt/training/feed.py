"""From samples on the host to micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.randomness import Noise


def micro_batches(
    samples: Iterator[tuple[np.ndarray, np.ndarray]], seed: int | None, device: torch.device
) -> Iterator[MicroBatch]:
    """Tokens, labels and noise of each (ordinals [b], tokens [b, S + 1]). Without a seed, noise is off."""
    for ordinals, tokens in samples:
        tokens_BS1 = torch.from_numpy(tokens).to(device, non_blocking=True)
        noise = None if seed is None else Noise(seed, tuple(ordinals.tolist()))
        yield MicroBatch(tokens_BS1[:, :-1], tokens_BS1[:, 1:], noise)
