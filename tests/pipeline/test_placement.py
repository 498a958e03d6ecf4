"""Placements: by hand, searched, and how well a step fills them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.counts import count_parameters
from megatron_rgpt.pipeline.costs import flops_costs
from megatron_rgpt.pipeline.placement import Placement, parse_placement
from megatron_rgpt.pipeline.placement_search import StageMemory, predict_fill, search_placement
from megatron_rgpt.pipeline.schedule import Limits, plan
from tests.pipeline.strategies import placements

VOCAB = 50257
LAYOUT = Layout.parse("3+20x4+2")


def model(layout: str, hidden_size: int = 256) -> ModelConfig:
    return ModelConfig(layout=Layout.parse(layout), hidden_size=hidden_size, num_attention_heads=4)


def test_a_placement_by_hand_reads_as_it_is_written():
    placement = parse_placement(" core=3,5,6,6  coda=2,0,0,0 ", LAYOUT, 4)
    assert placement == Placement((3, 5, 6, 6), (2, 0, 0, 0), 3)
    assert parse_placement(str(placement), LAYOUT, 4) == placement
    assert list(placement.core_blocks(1)) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "text, stages, names",
    [
        ("core=3,5,6,6", 4, "does not parse"),
        ("core=3,5,6,-6 coda=2,0,0,0", 4, "does not parse"),
        ("core=3,5,12 coda=2,0,0,0", 4, "core names 3 stages.*--pipeline-model-parallel-size is 4"),
        ("core=3,5,6,6 coda=2,0,0", 4, "coda names 3 stages"),
        ("core=3,5,6,7 coda=2,0,0,0", 4, "core places 21 blocks.*has 20"),
        ("core=3,5,6,6 coda=1,0,0,0", 4, "coda places 1 blocks.*has 2"),
        ("core=8,12,0 coda=2,0,0", 3, "stage 2 holds no block"),
        ("core=1,1 coda=1,1", 99, "99 is more than .* use at most 23"),
    ],
)
def test_a_placement_that_does_not_add_up_is_one_line_that_says_what_does_not(text, stages, names):
    with pytest.raises(UserError, match=names) as raised:
        parse_placement(text, LAYOUT, stages)
    assert "\n" not in str(raised.value)


def test_a_dense_model_and_too_many_stages_are_refused_before_any_search():
    for layout, stages, names in (("12", 2, "dense"), ("1+1x10+1", 4, "use at most 3")):
        config = model(layout)
        with pytest.raises(UserError, match=names):
            search_placement(config, VOCAB, stages, flops_costs(model("1+1x1+1"), VOCAB), [1, 2])


@given(placements())
def test_the_stages_store_the_model_once_and_each_block_lies_on_one_stage(placement: Placement):
    layout = Layout(placement.prelude, sum(placement.core), 3, sum(placement.coda))
    config = ModelConfig(layout=layout)
    assert sum(placement.parameters(config, VOCAB)) == count_parameters(config, VOCAB).total
    stages = range(placement.stages)
    assert [block for stage in stages for block in placement.core_blocks(stage)] == list(range(layout.core))
    assert [block for stage in stages for block in placement.coda_blocks(stage)] == list(range(layout.coda))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2), st.integers(1, 6), st.integers(0, 3), st.integers(2, 4), st.integers(1, 6))
def test_a_searched_placement_holds_every_block_and_leaves_no_stage_empty(prelude, core, coda, stages, count):
    config = ModelConfig(layout=Layout(prelude, core, 4, coda))
    depths = [index % 5 for index in range(count)]
    costs = flops_costs(config, VOCAB)
    if stages > core + coda + 1:
        with pytest.raises(UserError, match=f"use at most {core + coda + 1}"):
            search_placement(config, VOCAB, stages, costs, depths)
        return
    placement = search_placement(config, VOCAB, stages, costs, depths)
    assert parse_placement(str(placement), config.layout, stages) == placement


def test_a_searched_placement_beats_even_shares_and_the_coda_at_the_end():
    config = model("2+8x4+3", 512)
    costs, depths = flops_costs(config, VOCAB), [1, 2, 3, 4] * 3
    searched = search_placement(config, VOCAB, 4, costs, depths)
    even = Placement((2, 2, 2, 2), (0, 0, 0, 3), 2)
    assert plan(searched, depths, costs).makespan < 0.85 * plan(even, depths, costs).makespan


def test_large_layouts_are_searched_without_looking_at_every_placement():
    config = model("3+30x6+3")
    placement = search_placement(config, VOCAB, 12, flops_costs(config, VOCAB), [1, 2, 3, 4, 5, 6])
    assert sum(placement.core) == 30 and sum(placement.coda) == 3
    assert max(placement.core[1:]) - min(placement.core[1:]) <= 2


def test_memory_moves_blocks_off_a_hub_that_the_vocabulary_fills():
    config = model("1+6x3+2")
    costs, depths = flops_costs(config, VOCAB), [1, 2, 3]
    free = search_placement(config, VOCAB, 2, costs, depths)
    weights = free.parameters(config, VOCAB)
    holds = plan(free, [3], costs).peak_held
    assert weights[0] > weights[1]
    memory = StageMemory(18 * weights[0] + holds[0] - 1, 18)
    placement = search_placement(config, VOCAB, 2, costs, depths, in_flight=3, memory=memory)
    assert placement.core[0] + placement.coda[0] < free.core[0] + free.coda[0]
    limits = memory.limits(placement, config, VOCAB, 3)
    step = plan(placement, depths, costs, limits)
    assert all(held <= limit for held, limit in zip(step.peak_held, limits.held, strict=True))
    with pytest.raises(UserError, match="no placement of --layout 1\\+6x3\\+2"):
        search_placement(config, VOCAB, 2, costs, depths, memory=StageMemory(18 * weights[0] // 2, 18))


def test_too_few_micro_batches_are_warned_of_with_the_number_that_would_fill_the_stages():
    config = model("2+12x4+2", 1024)
    costs = flops_costs(config, VOCAB)
    placement = search_placement(config, VOCAB, 3, costs, [1, 2, 3, 4] * 4)
    few = predict_fill(placement, [1, 2, 3, 4], costs, Limits(6))
    assert few.busy_share < 0.9 < few.ceiling
    assert few.enough is not None and few.enough > 4
    assert f"{few.enough} micro-batches would reach 90%" in few.warning()
    depths = [1 + index * 4 // few.enough for index in range(few.enough)]
    filled = predict_fill(placement, depths, costs, Limits(6))
    assert filled.busy_share >= 0.9 and filled.warning() is None


def test_the_number_of_micro_batches_that_fills_the_stages_is_near_the_least():
    placement = Placement((0, 2, 2, 1), (2, 0, 0, 3), 1)
    costs = flops_costs(model("1+5x6+5", 1280), VOCAB)
    enough = predict_fill(placement, [1, 2, 3, 4, 5, 6], costs).enough
    assert 6 < enough < 32 * 6

    def share(count: int) -> float:
        return plan(placement, [1 + index * 6 // count for index in range(count)], costs).busy_share

    assert share(enough) >= 0.89 and share(2 * enough // 3) < 0.9


def test_stages_whose_loads_differ_too_much_are_told_that_no_number_of_micro_batches_helps():
    costs = flops_costs(model("1+4x4+1"), 512)
    unbalanced = predict_fill(Placement((0, 4), (1, 0), 1), [4, 4], costs)
    assert unbalanced.enough is None
    assert f"allow {unbalanced.ceiling:.0%} at most" in unbalanced.warning()
    many = plan(Placement((0, 4), (1, 0), 1), [4] * 60, costs)
    assert many.busy_share <= unbalanced.ceiling < 0.9
