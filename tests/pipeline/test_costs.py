"""Costs of visits, against the counts of the whole model."""

from __future__ import annotations

import pytest

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.counts import executed_flops_per_token
from megatron_rgpt.pipeline.costs import flops_costs
from megatron_rgpt.pipeline.paths import visits
from megatron_rgpt.pipeline.placement import Placement

VOCAB = 50257
PLACEMENT = Placement(core=(1, 3, 1), coda=(0, 1, 1), prelude=2)


def model(**values) -> ModelConfig:
    return ModelConfig(layout=Layout.parse("2+5x4+2"), hidden_size=1024, num_attention_heads=16, **values)


@pytest.mark.parametrize("depth", [0, 1, 4, 7])
@pytest.mark.parametrize(
    "values", [{}, {"hoist_anchor": False}, {"gate": False}, {"anchor": False}, {"anchor": False, "gate": False}]
)
def test_the_visits_of_a_path_cost_what_the_model_executes(depth, values):
    costs = flops_costs(model(**values), VOCAB, micro_batch_size=3)
    forward = sum(costs.of(visit).forward for visit in visits(PLACEMENT, depth))
    assert forward == 3 * 1024 * executed_flops_per_token(model(**values), VOCAB, depth)


def test_a_backward_pass_costs_two_forwards_and_a_third_to_recompute_all_but_the_head():
    kept, recomputed = flops_costs(model(), VOCAB), flops_costs(model(), VOCAB, recompute=True)
    for visit in visits(PLACEMENT, 3):
        assert kept.of(visit).backward == 2 * kept.of(visit).forward
        head = visit.parts[-1].kind == "head"
        assert recomputed.of(visit).backward == (2 if head else 3) * kept.of(visit).forward


def test_recomputation_holds_the_input_of_a_core_visit_and_nothing_else_of_it():
    costs = flops_costs(model(), VOCAB, micro_batch_size=2, recompute=True, element_bytes=2)
    core = visits(PLACEMENT, 1)[1]
    assert costs.of(core).held == 1024 * 2 * 1024 * 2
    assert flops_costs(model(), VOCAB).of(core).held > 16 * costs.of(core).held
