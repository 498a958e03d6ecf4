"""The depth r of each micro-step of an iteration."""

from __future__ import annotations

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.randomness import step_depths


def micro_step_depths(config: Config, batch: BatchPlan, first_ordinal: int) -> list[int]:
    """One depth per micro-step, the same on every rank, for the iteration whose first sample is `first_ordinal`.

    The global batch is cut into D groups of consecutive samples, each with one depth; a micro-step lies within one.
    """
    layout = config.model.layout
    if layout.is_dense:
        return [0] * batch.micro_steps
    depths = step_depths(
        config.training.seed,
        first_ordinal,
        sampling=config.depth.depth_sampling,
        groups=batch.depths_per_step,
        smallest=config.depth.min_recurrences,
        largest=layout.recurrences,
    )
    group = batch.global_batch_size // batch.depths_per_step
    return [depths[step * batch.chunk // group] for step in range(batch.micro_steps)]
