"""The batch of one iteration: how the global batch splits into micro-steps and depth groups, and the run's length."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rgpt.config.schema import Config
from megatron_rgpt.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of one iteration and of the run. All counts are samples unless named otherwise."""

    micro_batch_size: int
    data_parallel_size: int
    global_batch_size: int
    micro_steps: int
    depths_per_step: int
    train_iters: int
    """Iterations of the whole run; 0 where the configuration gives no length."""

    @property
    def train_samples(self) -> int:
        return self.train_iters * self.global_batch_size

    @property
    def chunk(self) -> int:
        """Samples of one micro-step over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size


def plan_batch(config: Config, data_parallel_size: int) -> BatchPlan:
    """Split the global batch; raises `UserError` where sizes do not divide each other."""
    training = config.training
    micro, dp = training.micro_batch_size, data_parallel_size
    chunk = micro * dp
    total = training.global_batch_size or chunk
    if total % chunk:
        raise UserError(
            f"--global-batch-size {total} is not divisible by --micro-batch-size {micro} x {dp} data-parallel "
            f"ranks = {chunk}: choose a multiple of {chunk}"
        )
    depths = config.depth.depths_per_step or total // chunk
    if total % depths or (total // depths) % chunk:
        raise UserError(
            f"--depths-per-step {depths}: a group of {total}/{depths} samples (--global-batch-size {total}) must be a "
            f"whole number of micro-steps of --micro-batch-size {micro} x {dp} data-parallel ranks = {chunk} samples"
        )
    iters = training.train_iters or (training.train_samples or 0) // total
    if training.train_samples is not None and iters == 0:
        raise UserError(
            f"--train-samples {training.train_samples} is less than one --global-batch-size {total}: "
            "train on at least one global batch"
        )
    return BatchPlan(micro, dp, total, total // chunk, depths, iters)
