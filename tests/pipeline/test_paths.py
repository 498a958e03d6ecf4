"""The path of a micro-batch, against paths written out by hand."""

from __future__ import annotations

from megatron_rgpt.pipeline.paths import visits
from megatron_rgpt.pipeline.placement import Placement

SPLIT = Placement(core=(1, 2, 0), coda=(1, 0, 1), prelude=2)
"""The hub holds a block of the core and one of the coda, stage 1 core alone, stage 2 coda alone."""


def written(placement: Placement, depth: int, exits: tuple[int, ...] = ()) -> list[str]:
    """Each visit as `parent>stage: parts`."""
    lines = []
    for visit in visits(placement, depth, exits):
        parts = [f"{part.kind}{part.step or ''}{list(part.blocks) or ''}" for part in visit.parts]
        lines.append(f"{'' if visit.parent is None else visit.parent}>{visit.stage}: {' '.join(parts)}")
    return lines


def test_a_micro_batch_goes_round_the_ring_once_per_recurrence_and_ends_at_the_head():
    assert written(SPLIT, 2) == [
        ">0: prelude[0, 1] anchor project1 core1[0]",
        "0>1: core1[1, 2]",
        "1>0: gate1 project2 core2[0]",
        "2>1: core2[1, 2]",
        "3>0: gate2 coda2[0]",
        "4>2: coda2[1]",
        "5>0: head2",
    ]


def test_a_coda_that_lies_on_the_hub_alone_shares_the_last_visit_with_gate_and_head():
    placement = Placement(core=(0, 1), coda=(2, 0), prelude=1)
    assert written(placement, 1) == [
        ">0: prelude[0] anchor project1",
        "0>1: core1[0]",
        "1>0: gate1 coda1[0, 1] head1",
    ]


def test_depth_0_leaves_the_core_and_the_anchor_out():
    assert written(SPLIT, 0) == [">0: prelude[0, 1] coda[0]", "0>2: coda[1]", "1>0: head"]


def test_an_exit_branches_off_to_coda_and_head_while_the_loop_goes_on():
    assert written(SPLIT, 2, (1,)) == [
        ">0: prelude[0, 1] anchor project1 core1[0]",
        "0>1: core1[1, 2]",
        "1>0: gate1 project2 core2[0]",
        "2>0: coda1[0]",
        "3>2: coda1[1]",
        "4>0: head1",
        "2>1: core2[1, 2]",
        "6>0: gate2 coda2[0]",
        "7>2: coda2[1]",
        "8>0: head2",
    ]


def test_an_exit_whose_coda_starts_elsewhere_leaves_the_hub_from_the_gate_that_computed_it():
    placement = Placement(core=(0, 1), coda=(0, 1), prelude=1)
    assert written(placement, 1, (0, 7)) == [
        ">0: prelude[0] anchor project1",
        "0>1: coda[0]",
        "1>0: head",
        "0>1: core1[0]",
        "3>0: gate1",
        "4>1: coda1[0]",
        "5>0: head1",
    ]
