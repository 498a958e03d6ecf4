"""The placement whose simulated steps are shortest, and how well a number of micro-batches fills it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import comb

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.costs import Cost, Costs
from megatron_rgpt.pipeline.paths import visits
from megatron_rgpt.pipeline.placement import HUB, Placement, check_stages
from megatron_rgpt.pipeline.schedule import USUAL_LIMITS, Limits, plan, quick_effort

ENUMERATED = 20_000
"""Up to so many placements all are looked at; beyond, only those that a walk from balanced ones meets."""
FILL_LIMIT = 32
"""Up to so many times the micro-batches of a step are looked at to fill the stages."""
ROUNDS = ((48, 12), (12, 48), (4, 240))
"""Placements that are simulated in each round, and with which effort."""


@dataclass(frozen=True)
class StageMemory:
    """What a stage's device holds. ZeRO-1 in bf16: 2 + 4 + 12 / DP bytes per parameter, besides 4 of fp32 gradients."""

    capacity: int
    """Bytes for weights, gradients, optimizer state and activations."""
    bytes_per_parameter: float

    def limits(self, placement: Placement, config: ModelConfig, vocab_size: int, in_flight: int | None) -> Limits:
        """What remains for activations on each stage; negative where the weights alone are too much."""
        parameters = placement.parameters(config, vocab_size)
        return Limits(in_flight, tuple(int(self.capacity - self.bytes_per_parameter * count) for count in parameters))


def search_placement(
    config: ModelConfig,
    vocab_size: int,
    stages: int,
    costs: Costs,
    depths: Sequence[int],
    *,
    in_flight: int | None = None,
    memory: StageMemory | None = None,
) -> Placement:
    """The placement with the shortest simulated step over micro-batches of these depths, among those that fit.

    Placements are ordered by what bounds their steps, then simulated in rounds of fewer and longer searches. Raises
    `UserError` where the layout has too few blocks for the stages, or nothing fits into `memory`.
    """
    layout = config.layout
    check_stages(layout, stages)
    assert depths, "a step has micro-batches"

    def limits(placement: Placement) -> Limits:
        return Limits(in_flight) if memory is None else memory.limits(placement, config, vocab_size, in_flight)

    found = sorted(_candidates(layout, stages, costs, depths), key=lambda candidate: candidate[0])
    fitting = (entry for entry in found if memory is None or _fits(entry[1], costs, depths, limits(entry[1])))
    places = [(rating[0], placement) for rating, placement in islice(fitting, ROUNDS[0][0])]
    if not places:
        assert memory is not None
        raise UserError(
            f"no placement of --layout {layout} over --pipeline-model-parallel-size {stages} fits into "
            f"{memory.capacity / 1e9:.3g} GB a stage: use more stages, a smaller --micro-batch-size or --recompute step"
        )
    shortest: dict[Placement, int] = {}
    for count, effort in ROUNDS:
        for bound, placement in places[:count]:
            if not shortest or bound < min(shortest.values()):
                step = plan(placement, depths, costs, limits(placement), effort=effort)
                shortest[placement] = min(step.makespan, shortest.get(placement, step.makespan))
        places = sorted((entry for entry in places if entry[1] in shortest), key=lambda entry: shortest[entry[1]])
    return places[0][1]


@dataclass(frozen=True)
class Fill:
    """How well the micro-batches of a step fill the stages."""

    micro_batches: int
    busy_share: float
    target: float
    enough: int | None
    """The least micro-batches, with depths spread alike, that reach the target; None where no number looked at does."""
    ceiling: float
    """Busy share that no number of micro-batches exceeds: mean work over the busiest stage's."""

    def warning(self) -> str | None:
        """One line for the user where the target is missed."""
        if self.busy_share >= self.target:
            return None
        if self.enough is not None:
            remedy = f"{self.enough} micro-batches would reach {self.target:.0%}"
        else:
            most = FILL_LIMIT * self.micro_batches
            remedy = f"no number up to {most} reaches {self.target:.0%} (the loads allow {self.ceiling:.0%} at most)"
        return (
            f"{self.micro_batches} micro-batches a step keep the pipeline's stages busy for {self.busy_share:.0%} "
            f"of it; {remedy}"
        )


def predict_fill(
    placement: Placement,
    depths: Sequence[int],
    costs: Costs,
    limits: Limits = USUAL_LIMITS,
    *,
    target: float = 0.9,
    effort: int = 120,
) -> Fill:
    """Predict the busy share of a step, and how many micro-batches of such depths would reach `target`.

    Searches up to `FILL_LIMIT` times as many micro-batches by doubling and halving: the share grows with their number,
    but for small waves, so the number found is one that reaches it, and near the least. `effort` is that of the step
    itself; with more micro-batches it shrinks, so that each number takes as long to look at.
    """
    rising = sorted(depths)
    own = len(rising)

    def share(count: int) -> float:
        spread = [rising[index * own // count] for index in range(count)]
        least = quick_effort(placement.stages)
        return plan(placement, spread, costs, limits, effort=max(least, effort * own // count)).busy_share

    here = share(own)
    loads = _Loads(placement.prelude, costs, rising).of(placement)
    ceiling = sum(loads) / len(loads) / max(loads)
    enough = own if here >= target else None
    if enough is None and ceiling > target:
        low, high = own, 2 * own
        while (reached := share(high)) < target and 2 * high <= FILL_LIMIT * own:
            low, high = high, 2 * high
        if reached >= target:
            while high - low > max(1, high // 32):
                middle = (low + high) // 2
                low, high = (low, middle) if share(middle) >= target else (middle, high)
            enough = high
    return Fill(own, here, target, enough, ceiling)


Rated = tuple[tuple[int, int], Placement]
"""A placement with a bound of its step's makespan, and with how uneven its loads are."""


def _candidates(layout: Layout, stages: int, costs: Costs, depths: Sequence[int]) -> Iterable[Rated]:
    """Placements worth a simulation, each once."""
    loads = _Loads(layout.prelude, costs, depths)
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Rated] = {}

    def rate(core: tuple[int, ...], coda: tuple[int, ...]) -> Rated:
        if (core, coda) not in known:
            placement = Placement(core, coda, layout.prelude)
            unevenness = sum(load * load for load in loads.of(placement))
            known[core, coda] = (loads.bound(placement), unevenness), placement
        return known[core, coda]

    total = comb(layout.core + stages - 1, stages - 1) * comb(layout.coda + stages - 1, stages - 1)
    if total <= ENUMERATED:
        for core, coda in product(_compositions(layout.core, stages), _compositions(layout.coda, stages)):
            if _filled(core, coda):
                rate(core, coda)
        return known.values()
    for core, coda in _starts(layout, stages):
        here, before = rate(core, coda), None
        while here is not before:
            before = here
            around = (rate(*shares) for shares in _neighbours(before[1].core, before[1].coda))
            here = min((before, *around), key=lambda rated: rated[0])
    return known.values()


def _starts(layout: Layout, stages: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Even cores, the coda on one stage or spread from the hub on."""
    even = tuple(layout.core // stages + (stage >= stages - layout.core % stages) for stage in range(stages))
    for holder in range(stages):
        coda = tuple(layout.coda if stage == holder else 0 for stage in range(stages))
        if _filled(even, coda):
            yield even, coda
    spread = tuple(layout.coda // stages + (stage < layout.coda % stages) for stage in range(stages))
    if _filled(even, spread):
        yield even, spread
    if layout.core < stages:
        # fewer core blocks than stages: one each from the far end, the coda fills the others
        core = tuple(int(stage >= stages - layout.core) for stage in range(stages))
        empty = stages - layout.core - 1
        coda = tuple(
            0 if stage == HUB or core[stage] else layout.coda // empty + (stage <= layout.coda % empty)
            for stage in range(stages)
        )
        if sum(coda) == layout.coda and _filled(core, coda):
            yield core, coda


def _neighbours(core: tuple[int, ...], coda: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Placements with one block moved."""
    for source, target in product(range(len(core)), repeat=2):
        if source == target:
            continue
        for moved, other, is_core in ((core, coda, True), (coda, core, False)):
            if moved[source]:
                shares = list(moved)
                shares[source] -= 1
                shares[target] += 1
                found = (tuple(shares), other) if is_core else (other, tuple(shares))
                if _filled(*found) and sum(found[0]):
                    yield found


def _filled(core: Sequence[int], coda: Sequence[int]) -> bool:
    """Whether every stage but the hub has a block."""
    return all(a or b for a, b in zip(core[1:], coda[1:], strict=True))


def _compositions(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to share blocks out over stages."""
    if stages == 1:
        yield (blocks,)
        return
    for first in range(blocks + 1):
        for rest in _compositions(blocks - first, stages - 1):
            yield (first, *rest)


class _Loads:
    """What each stage works in a step, and the ways to it and from it, of any placement of one model."""

    def __init__(self, prelude: int, costs: Costs, depths: Sequence[int]) -> None:
        def time(cost: Cost) -> int:
            return cost.forward + cost.backward

        self.block, self.hop = time(costs.block), 2 * costs.hop
        self.micro_batches, self.loops, self.shallowest = len(depths), sum(depths), min(depths)
        looped = sum(depth > 0 for depth in depths)
        modulation = time(costs.project) + time(costs.gate)
        self.hub = (
            self.micro_batches * (prelude * self.block + time(costs.head))
            + looped * time(costs.anchor)
            + self.loops * modulation
        )
        self.entry = prelude * self.block
        self.start = time(costs.anchor) + time(costs.project)
        self.gate = time(costs.gate)

    def of(self, placement: Placement) -> list[int]:
        """Work of each stage."""
        shares = zip(placement.core, placement.coda, strict=True)
        loads = [self.block * (core * self.loops + coda * self.micro_batches) for core, coda in shares]
        loads[HUB] += self.hub
        return loads

    def bound(self, placement: Placement) -> int:
        """The largest work of a stage with the shortest way there and back, a lower bound of the step's time."""
        lead = [0] * placement.stages
        way = self.entry + self.start
        for stage in range(placement.stages):
            if placement.core[stage]:
                way += self.hop if stage else 0
                lead[stage] = way if stage else 0
                way += self.block * placement.core[stage]
        # a stage of the coda alone comes after the least number of loops; one is a lower bound of more
        back = self.hop if any(placement.core[1:]) else 0
        way = way + back + self.gate if self.shallowest else self.entry
        for stage in range(placement.stages):
            if placement.coda[stage]:
                way += self.hop if stage else 0
                after = way if stage else 0
                lead[stage] = min(lead[stage], after) if placement.core[stage] else after
                way += self.block * placement.coda[stage]
        return max(load + ahead for load, ahead in zip(self.of(placement), lead, strict=True))


def _fits(placement: Placement, costs: Costs, depths: Sequence[int], limits: Limits) -> bool:
    """Whether one micro-batch of each depth fits alone."""
    assert limits.held is not None
    for depth in set(depths):
        holds = [0] * placement.stages
        for visit in visits(placement, depth):
            holds[visit.stage] += costs.of(visit).held
        if any(hold > limit for hold, limit in zip(holds, limits.held, strict=True)):
            return False
    return True
