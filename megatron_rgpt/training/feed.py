"""From samples on the host to micro-batches on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_rgpt.data.masks import loss_mask, position_ids
from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.parallel.mesh import Group
from megatron_rgpt.randomness import Noise


@dataclass(frozen=True)
class Documents:
    """What the end-of-document token does: restart positions behind it, count no loss at it."""

    eod: int
    reset_positions: bool
    mask_loss: bool


def micro_batches(
    samples: Iterator[tuple[np.ndarray, np.ndarray]],
    seed: int | None,
    device: torch.device,
    documents: Documents | None = None,
) -> Iterator[MicroBatch]:
    """The micro-batch of each (ordinals [b], tokens [b, S + 1]). Without a seed, noise is off.

    Weights of masked losses come as 0 and 1: `balance` them over the global batch.
    """

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    for ordinals, tokens in samples:
        tokens_BS1 = on_device(tokens)
        noise = None if seed is None else Noise(seed, tuple(ordinals.tolist()))
        positions_BS = weights_BS = None
        if documents is not None and documents.reset_positions:
            positions_BS = on_device(position_ids(tokens[:, :-1], documents.eod))
        if documents is not None and documents.mask_loss:
            weights_BS = on_device(loss_mask(tokens[:, :-1], documents.eod))
        yield MicroBatch(tokens_BS1[:, :-1], tokens_BS1[:, 1:], noise, positions_BS, weights_BS)


def balance(batches: list[MicroBatch], data: Group) -> list[MicroBatch]:
    """Scale weights so that their mean over the global batch, on all data-parallel ranks, is 1. Collective if masked.

    The loss is then the mean over the tokens that count, however they fall into micro-batches and ranks.
    """
    if batches[0].weights_BS is None:
        return batches
    mean = torch.stack([batch.weights_BS.double().mean() for batch in batches]).mean()
    dist.all_reduce(mean, group=data.handle)
    scale = data.size / mean.clamp(min=1e-9)
    return [batch._replace(weights_BS=(batch.weights_BS * scale).float()) for batch in batches]
