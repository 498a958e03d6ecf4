"""Random placements, costs, depths and limits, for properties that hold for all of them."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from megatron_rgpt.pipeline.costs import Cost, Costs
from megatron_rgpt.pipeline.paths import visits
from megatron_rgpt.pipeline.placement import Placement
from megatron_rgpt.pipeline.schedule import Limits, Plan, plan


class Case(NamedTuple):
    """Arguments of a plan."""

    placement: Placement
    depths: tuple[int, ...]
    costs: Costs
    limits: Limits
    forward_only: bool
    exits: tuple[int, ...]
    effort: int

    def plan(self) -> Plan:
        return plan(
            self.placement,
            self.depths,
            self.costs,
            self.limits,
            forward_only=self.forward_only,
            exits=self.exits,
            effort=self.effort,
        )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """2 to 6 stages; some may hold no block at all."""
    stages = draw(st.integers(2, 6))
    shares = st.lists(st.integers(0, 4), min_size=stages, max_size=stages).map(tuple)
    return Placement(draw(shares.filter(any)), draw(shares), draw(st.integers(0, 3)))


def cost() -> st.SearchStrategy[Cost]:
    """Times may be 0."""
    return st.builds(Cost, st.integers(0, 20), st.integers(0, 40), st.integers(0, 9))


def costs() -> st.SearchStrategy[Costs]:
    piece = cost()
    return st.builds(Costs, piece, piece, piece, piece, piece, st.integers(0, 5), st.integers(0, 15))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any step; held limits are at least what the largest micro-batch needs alone, and at most three times that."""
    placement, price = draw(placements()), draw(costs())
    depths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)))
    exits = tuple(draw(st.sets(st.integers(0, 5), max_size=3)))
    forward_only = draw(st.booleans())
    held = None
    if draw(st.booleans()):
        alone = [0] * placement.stages
        for depth in depths:
            holds = [0] * placement.stages
            for visit in visits(placement, depth, exits):
                holds[visit.stage] += price.of(visit).held
            alone = [max(pair) for pair in zip(alone, holds, strict=True)]
        held = tuple(need * draw(st.integers(10, 30)) // 10 for need in alone)
    limits = Limits(draw(st.none() | st.integers(1, 2 * placement.stages)), held)
    return Case(placement, depths, price, limits, forward_only, exits, draw(st.integers(1, 25)))
