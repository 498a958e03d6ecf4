"""Loss on held-out data, at the final exit or at every exit of the loop."""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.data.datasets import Dataset
from megatron_rgpt.data.sampler import batches
from megatron_rgpt.randomness import key
from megatron_rgpt.training.engine import Engine
from megatron_rgpt.training.feed import Documents, balance, micro_batches


def exits_to_evaluate(config: Config) -> list[int]:
    """Exits k in rising order; the last is R. A dense model has only exit 0."""
    largest = config.model.layout.recurrences
    return list(range(largest + 1)) if config.evaluation.eval_exits == "all" else [largest]


def evaluate(
    engine: Engine, dataset: Dataset, config: Config, batch: BatchPlan, documents: Documents | None = None
) -> list[float]:
    """Mean loss in nats per token at each exit, over the same first `eval_iters` global batches each time.

    Collective; every rank gets the result. Noise is off unless `--eval-noise`.
    """
    exits, data = exits_to_evaluate(config), engine.mesh.data
    samples = config.evaluation.eval_iters * batch.global_batch_size
    seed = key(config.training.seed, "evaluation") if config.model.eval_noise else None
    samples_of_rank = batches(dataset, 0, batch.micro_batch_size, data.rank, data.size)
    feed = micro_batches(samples_of_rank, seed, engine.device, documents)
    total = torch.zeros(len(exits), dtype=torch.float64, device=engine.device)
    for _ in range(config.evaluation.eval_iters):
        total += engine.exit_losses(balance(list(islice(feed, batch.micro_steps)), data), exits)
    dist.all_reduce(total, group=data.handle)
    return (total * batch.micro_batch_size / samples).tolist()
