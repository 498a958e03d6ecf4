"""What a run's configuration makes of its pipeline."""

from __future__ import annotations

import pytest

from megatron_rgpt.config import Config, Layout, plan_batch
from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.configure import PipelinePlan, configure_pipeline
from megatron_rgpt.pipeline.schedule import THOROUGH_EFFORT, quick_effort

BASE = Config().changed(
    layout=Layout(1, 2, 4, 1),
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=100,
    precision="fp32",
    pipeline_model_parallel_size=2,
)


def pipeline_of(**changes) -> PipelinePlan:
    config = BASE.changed(**{"global_batch_size": 8, **changes})
    return configure_pipeline(config, plan_batch(config, 1))


def test_a_run_without_stages_has_no_pipeline() -> None:
    assert pipeline_of(pipeline_model_parallel_size=1) is None


def test_a_dense_model_has_no_core_to_spread() -> None:
    with pytest.raises(UserError, match="dense"):
        pipeline_of(layout=Layout(4))


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({"depth_sampling": "fixed"}, True),
        ({"depth_sampling": "stratified"}, True),
        ({"depth_sampling": "stratified", "depths_per_step": 4}, True),
        ({"depth_sampling": "stratified", "depths_per_step": 2}, False),
        ({"depth_sampling": "stratified", "min_recurrences": 0}, False),
        ({"depth_sampling": "uniform"}, False),
    ],
)
def test_a_plan_that_serves_a_long_run_is_searched_longer(changes: dict, repeats: bool) -> None:
    assert pipeline_of(train_iters=100_000, **changes).effort == (THOROUGH_EFFORT if repeats else quick_effort(2))


def test_planning_takes_the_same_share_of_a_short_run_as_of_a_step() -> None:
    assert pipeline_of(depth_sampling="fixed", train_iters=5).effort == 5 * quick_effort(2)
    assert pipeline_of(depth_sampling="fixed").effort == quick_effort(2)


def test_a_placement_by_hand_is_taken_and_its_fill_predicted() -> None:
    pipeline = pipeline_of(pipeline_placement="core=0,2 coda=1,0")
    assert str(pipeline.placement) == "core=0,2 coda=1,0"
    assert pipeline.fill.micro_batches == 8 and 0 < pipeline.fill.busy_share < pipeline.fill.ceiling
