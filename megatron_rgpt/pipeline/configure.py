"""From the configuration to the pipeline of a run: placement, costs, limits, and how well it will be filled."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.pipeline.costs import Costs, flops_costs
from megatron_rgpt.pipeline.placement import Placement, check_stages, parse_placement
from megatron_rgpt.pipeline.placement_search import Fill, predict_fill, search_placement
from megatron_rgpt.pipeline.schedule import THOROUGH_EFFORT, USUAL_LIMITS, Limits, quick_effort


@dataclass(frozen=True)
class PipelinePlan:
    """What every stage needs to plan its steps, the same on all ranks."""

    placement: Placement
    costs: Costs
    limits: Limits
    fill: Fill
    """Predicted for a step whose depths are spread as the run draws them."""
    effort: int
    """Simulated steps per plan."""


def configure_pipeline(config: Config, batch: BatchPlan) -> PipelinePlan | None:
    """The pipeline of a run, None without one. Raises `UserError` for a layout or placement that does not fit."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return None
    check_stages(config.model.layout, stages)
    costs = flops_costs(
        config.model,
        config.data.vocab_size,
        micro_batch_size=batch.micro_batch_size,
        recompute=config.training.recompute == "step",
        element_bytes={"bf16": 2, "fp32": 4, "fp64": 8}[config.training.precision],
    )
    depths = _typical_depths(config, batch)
    if config.parallel.pipeline_placement is not None:
        placement = parse_placement(config.parallel.pipeline_placement, config.model.layout, stages)
    else:
        placement = search_placement(config.model, config.data.vocab_size, stages, costs, depths)
    return PipelinePlan(
        placement, costs, USUAL_LIMITS, predict_fill(placement, depths, costs), _effort(config, batch, stages)
    )


def _typical_depths(config: Config, batch: BatchPlan) -> list[int]:
    """Depths of a step's micro-batches, spread as evenly over the drawn range as they are on average."""
    values, count = _drawn(config), batch.micro_steps
    return [values[place * len(values) // count] for place in range(count)]


def _effort(config: Config, batch: BatchPlan, stages: int) -> int:
    """How long to look for a plan: where all steps have the same depths, in some order, one plan serves them all."""
    sampling, quick = config.depth.depth_sampling, quick_effort(stages)
    same = sampling == "fixed" or (sampling == "stratified" and batch.depths_per_step % len(_drawn(config)) == 0)
    # a short run is not worth a long search: planning keeps the share that it has of a single step
    return min(THOROUGH_EFFORT, quick * max(1, batch.train_iters)) if same else quick


def _drawn(config: Config) -> range:
    """The depths that a step may have."""
    largest = config.model.layout.recurrences
    smallest = largest if config.depth.depth_sampling == "fixed" else config.depth.min_recurrences
    return range(smallest, largest + 1)
