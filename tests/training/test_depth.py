"""The depth of a sample belongs to the sample's place in the run, not to the layout."""

from __future__ import annotations

import pytest

from megatron_rgpt.config import BatchPlan, Config, Layout, plan_batch
from megatron_rgpt.training.depth import micro_step_depths

CONFIG = Config().changed(layout=Layout.parse("1+1x6+1"), global_batch_size=16)


def sample_depths(config: Config, batch: BatchPlan, first: int) -> list[int]:
    """Depth of each sample of the global batch, in order."""
    return [depth for depth in micro_step_depths(config, batch, first) for _ in range(batch.chunk)]


@pytest.mark.parametrize("sampling", ["uniform", "stratified", "fixed"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_samples_have_the_same_depths_for_any_ranks_and_micro_batch(sampling: str, groups: int) -> None:
    config = CONFIG.changed(depth_sampling=sampling, depths_per_step=groups)
    layouts = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    for first in range(0, 160, 16):
        seen = {
            tuple(sample_depths(config, plan_batch(config.changed(micro_batch_size=micro), ranks), first))
            for ranks, micro in layouts
        }
        assert len(seen) == 1
        (depths,) = seen
        size = 16 // groups
        assert all(len(set(depths[start : start + size])) == 1 for start in range(0, 16, size))


def test_by_default_each_micro_step_has_a_depth_of_its_own() -> None:
    batch = plan_batch(CONFIG.changed(micro_batch_size=2), 2)
    assert batch.depths_per_step == batch.micro_steps == 4


def test_a_dense_model_has_depth_0() -> None:
    config = CONFIG.changed(layout=Layout(3))
    assert micro_step_depths(config, plan_batch(config, 2), 0) == [0] * 8
