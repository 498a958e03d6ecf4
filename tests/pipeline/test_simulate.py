"""Simulated steps that are small enough to know by heart."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from megatron_rgpt.pipeline.graph import Task, bounds, build_graph, reversed_graph
from megatron_rgpt.pipeline.policies import search
from megatron_rgpt.pipeline.simulate import run
from tests.pipeline.strategies import Case, cases


def chain(*stages: int) -> tuple[Task, ...]:
    """A job over these stages: 1 forward, 2 backward each."""
    return tuple(Task(stage, 1, 2, 1, index - 1 if index else None) for index, stage in enumerate(stages))


def test_a_lone_job_takes_the_length_of_its_path_and_each_hop_twice():
    assert run(build_graph([chain(0, 1, 0)], 2), range(6), 1).makespan == 9
    assert run(build_graph([chain(0, 1, 0)], 2, hop=5), range(6), 1).makespan == 9 + 4 * 5
    assert run(build_graph([chain(0, 1, 0)], 2, forward_only=True, hop=5), range(3), 1).makespan == 3 + 2 * 5


def test_two_equal_jobs_overlap_as_far_as_one_stage_behind_the_other_allows():
    graph = build_graph([chain(0, 1), chain(0, 1)], 2)
    # stage 1 works 6 after the first forward pass and before the last backward pass: 1 + 6 + 2
    assert bounds(graph).best == 9
    assert search(graph, [2], 20).makespan == 9
    # one at a time, the second starts when the first is done
    assert search(graph, [1], 20).makespan == 12


def test_the_search_finds_the_optimum_of_small_steps_that_enumeration_finds():
    for stages in ([(0, 1, 0), (0, 1)], [(0, 1), (0, 1, 0, 1, 0), (0, 1, 0)], [(0, 1, 2, 0), (0, 1), (0, 2, 0)]):
        graph = build_graph([chain(*way) for way in stages], 3)
        generator = range(len(graph.stage))
        tried = itertools.islice(itertools.permutations(generator), 0, 40_000, 7)
        assert search(graph, [3], 200).makespan <= min(run(graph, urgency, 3).makespan for urgency in tried)


def test_a_stage_takes_the_most_urgent_ready_operation_and_ties_break_alike():
    graph = build_graph([chain(0), chain(0)], 1)
    assert run(graph, [0, 3, 1, 2], 2).log == [0, -1, 2, -3, 3, -4, 1, -2]
    assert run(graph, [0, 0, 0, 0], 2).log == [0, -1, 1, -2, 2, -3, 3, -4]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_step_run_backwards_and_mirrored_keeps_the_order_of_every_path(case: Case):
    step = case.plan()
    mirror = reversed_graph(step.graph)
    mirrored = run(mirror, range(len(mirror.stage)), step.in_flight)
    for operation, later in enumerate(step.graph.after):
        for other in later:
            hop = step.graph.hop if step.graph.stage[operation] != step.graph.stage[other] else 0
            assert mirrored.end[other] + hop <= mirrored.end[operation] - mirror.duration[operation]
