"""Plans, by property over random placements, depths, costs, exits and limits; and the figures of the design."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.costs import Costs, flops_costs
from megatron_rgpt.pipeline.placement import Placement, parse_placement
from megatron_rgpt.pipeline.schedule import Limits, Planner, plan
from tests.pipeline.execution import run_with_rendezvous, time_of_execution
from tests.pipeline.strategies import Case, cases

thorough = settings(max_examples=150, deadline=None)
quick = settings(max_examples=60, deadline=None)


@thorough
@given(cases())
def test_every_visit_runs_once_forward_and_once_backward_although_every_transfer_blocks(case: Case):
    step = case.plan()
    done = run_with_rendezvous(step, case.costs)
    every = Counter((i, v) for i, path in enumerate(step.paths) for v in range(len(path)))
    assert Counter(done.forwards) == every
    assert Counter(done.backwards) == (Counter() if case.forward_only else every)
    hops = [(i, v) for i, path in enumerate(step.paths) for v, visit in enumerate(path) if _travels(path, visit)]
    payloads = ("activation",) if case.forward_only else ("activation", "gradient")
    assert Counter(done.transfers) == Counter((payload, *hop) for payload in payloads for hop in hops)


def _travels(path, visit) -> bool:
    return visit.parent is not None and path[visit.parent].stage != visit.stage


@thorough
@given(cases())
def test_no_stage_exceeds_the_declared_limits(case: Case):
    step = case.plan()
    done = run_with_rendezvous(step, case.costs)
    cap = case.limits.in_flight or 2 * case.placement.stages
    assert max(done.peak_in_flight) <= step.in_flight <= cap
    assert tuple(done.peak_held) == step.peak_held
    if case.limits.held is not None:
        assert all(peak <= limit for peak, limit in zip(done.peak_held, case.limits.held, strict=True))


@thorough
@given(cases())
def test_the_makespan_is_above_its_bounds_and_what_stages_that_follow_their_programs_need(case: Case):
    step = case.plan()
    work = sum(
        costs.forward + (0 if case.forward_only else costs.backward)
        for path in step.paths
        for costs in map(case.costs.of, path)
    )
    assert step.makespan >= work / case.placement.stages
    assert step.makespan >= max(_longest_path(path, case) for path in step.paths)
    assert step.makespan >= step.bounds.best
    assert time_of_execution(step, case.costs) <= step.makespan
    spans = step.spans()
    assert step.makespan == max(span.end for span in spans)
    for stage in range(case.placement.stages):
        own = [span for span in spans if span.stage == stage]
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))
        if step.makespan:
            assert step.busy[stage] == pytest.approx(sum(s.end - s.start for s in own) / step.makespan)


def _longest_path(path, case: Case) -> int:
    """The longest way down the tree and, in training, back up."""
    ends = []
    for visit in path:
        start = 0
        if visit.parent is not None:
            start = ends[visit.parent] + (case.costs.hop if _travels(path, visit) else 0)
        ends.append(start + case.costs.of(visit).forward)
    if case.forward_only:
        return max(ends)
    below = [0] * len(path)
    for number in reversed(range(len(path))):
        cost = case.costs.of(path[number])
        children = [child for child, visit in enumerate(path) if visit.parent == number]
        hops = [2 * case.costs.hop if _travels(path, path[child]) else 0 for child in children]
        ways = [below[child] + hop for child, hop in zip(children, hops, strict=True)]
        below[number] = cost.forward + cost.backward + max(ways, default=0)
    return below[0]


@quick
@given(cases())
def test_every_stage_computes_the_same_plan(case: Case):
    one, other = case.plan(), case.plan()
    for stage in range(case.placement.stages):
        assert one.program(stage) == other.program(stage)


@quick
@given(cases(), st.randoms(use_true_random=False))
def test_a_multiset_of_depths_is_planned_once_and_its_micro_batches_relabelled(case: Case, random):
    planner = Planner(case.placement, case.costs, case.limits, effort=case.effort)
    first = planner.plan(case.depths, forward_only=case.forward_only, exits=case.exits)
    shuffled = list(case.depths)
    random.shuffle(shuffled)
    second = planner.plan(shuffled, forward_only=case.forward_only, exits=case.exits)
    assert second.run is first.run
    assert [len(path) for path in second.paths] == [len(first.paths[first.depths.index(depth)]) for depth in shuffled]
    run_with_rendezvous(second, case.costs)


@quick
@given(cases(), st.integers(30, 60))
def test_more_effort_never_gives_a_longer_step_than_the_first_policy(case: Case, effort: int):
    assert case._replace(effort=effort).plan().makespan <= case._replace(effort=1).plan().makespan


def test_planning_needs_no_torch():
    program = (
        "import sys, megatron_rgpt.pipeline.placement_search, megatron_rgpt.pipeline.render; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_step_whose_depths_are_all_0_has_no_transfers_where_the_coda_lies_on_the_hub():
    costs = flops_costs(ModelConfig(), 512)
    step = plan(Placement((0, 1), (1, 0), 1), [0, 0, 0], costs)
    assert [operation.kind for operation in step.program(0)].count("forward") == 3
    assert step.program(1) == []
    assert run_with_rendezvous(step, costs).transfers == []


def test_a_micro_batch_that_exceeds_the_limit_alone_is_an_error_that_names_stage_and_depth():
    costs = flops_costs(ModelConfig(), 512)
    placement = Placement((0, 1), (1, 0), 1)
    need = 3 * costs.of(plan(placement, [3], costs).paths[0][1]).held
    assert plan(placement, [3, 3], costs, Limits(held=(10**12, need))).peak_held[1] == need
    with pytest.raises(UserError, match=r"stage 1 .* depth 3"):
        plan(placement, [3], costs, Limits(held=(10**12, need - 1)))


@pytest.mark.parametrize(
    "layout, hidden_size, placement, micro_batches, busy_share",
    [
        ("3+30x6+3", 1280, "core=14,16 coda=3,0", 12, 0.96),
        ("3+30x6+3", 1280, "core=6,8,8,8 coda=2,1,0,0", 18, 0.92),
        ("3+30x6+3", 1280, "core=2,4,4,4,4,4,4,4 coda=0,1,1,1,0,0,0,0", 36, 0.87),
        ("2+20x4+2", 1024, "core=9,11 coda=2,0", 8, 0.94),
        ("2+20x4+2", 1024, "core=3,6,6,5 coda=2,0,0,0", 16, 0.90),
        ("2+20x4+2", 1024, "core=0,2,3,3,3,3,3,3 coda=0,2,0,0,0,0,0,0", 32, 0.86),
        ("1+5x6+5", 1280, "core=2,3 coda=2,3", 12, 0.95),
        ("1+5x6+5", 1280, "core=0,2,1,2 coda=2,0,3,0", 18, 0.84),
        ("2+5x4+2", 1024, "core=1,4 coda=2,0", 8, 0.90),
        ("2+5x4+2", 1024, "core=0,1,2,2 coda=0,2,0,0", 16, 0.78),
    ],
)
def test_the_stages_are_as_busy_as_the_design_asks(layout, hidden_size, placement, micro_batches, busy_share):
    config = ModelConfig(layout=Layout.parse(layout), hidden_size=hidden_size, num_attention_heads=16)
    recurrences = config.layout.recurrences
    depths = [1 + index % recurrences for index in range(micro_batches)]
    stages = placement.split()[0].count(",") + 1
    costs: Costs = flops_costs(config, 50257)
    step = plan(parse_placement(placement, config.layout, stages), depths, costs, effort=150)
    assert step.busy_share >= busy_share
