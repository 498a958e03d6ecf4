"""The plan of one step: what each stage does, in order, with the sends and receives between stages.

Pure, and a function of its arguments alone: every stage computes the same plan. Communications follow one global order,
that of the simulated step, and each stage's program is that order with the other stages' lines left out. So no stage
waits in a circle even if every send blocks until its receive runs and the reverse: of the transfers not yet done the
first in the order has nothing to wait for. An executor may post a receive earlier, as long as it keeps the order of
communications.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.costs import Costs
from megatron_rgpt.pipeline.graph import Bounds, Graph, Task, bounds, build_graph, needs
from megatron_rgpt.pipeline.paths import Visit, visits
from megatron_rgpt.pipeline.placement import Placement
from megatron_rgpt.pipeline.policies import search
from megatron_rgpt.pipeline.simulate import Run

THOROUGH_EFFORT = 3000
"""Simulated steps for a plan that serves a whole run: seconds, once."""


def quick_effort(stages: int) -> int:
    """Simulated steps for a plan that serves one step.

    Planning takes time per operation, a step takes (operations / stages) times an operation's duration: so this keeps
    planning at one share of the step, under 1 % (`tools/benchmark_pipeline.py planning`).
    """
    return max(3, 24 // stages)


@dataclass(frozen=True)
class Limits:
    """What a step may hold. In flight: from a micro-batch's first forward to its last backward pass, on any stage."""

    in_flight: int | None = None
    """Most micro-batches in flight (None: twice the stages)."""
    held: tuple[int, ...] | None = None
    """Most bytes of activations that each stage holds between forward and backward passes."""

    def caps(self, stages: int) -> tuple[int, ...]:
        """Caps of micro-batches in flight worth trying: the limit, and less."""
        most = 2 * stages if self.in_flight is None else self.in_flight
        return tuple(dict.fromkeys(max(1, cap) for cap in (most, most * 3 // 4, most // 2)))


USUAL_LIMITS = Limits()


class Operation(NamedTuple):
    """One line of a stage's program. A transfer is named by the visit whose input it is, at both of its ends."""

    kind: Literal["forward", "backward", "send", "receive"]
    micro_batch: int
    visit: int
    """Index in the micro-batch's path (`Plan.paths`)."""
    payload: Literal["activation", "gradient"] | None = None
    """Of a transfer: the visit's input, or the gradient of it, which travels the other way."""
    peer: int | None = None
    """Of a transfer: the stage at its other end."""


class Span(NamedTuple):
    """A pass of a visit in simulated time."""

    stage: int
    micro_batch: int
    visit: int
    backward: bool
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """A step over micro-batches of given depths. Times are in the unit of the costs, memory in bytes."""

    placement: Placement
    depths: tuple[int, ...]
    """Of each micro-batch."""
    forward_only: bool
    in_flight: int
    """Cap under which the step runs."""
    graph: Graph
    run: Run
    job_paths: tuple[tuple[Visit, ...], ...]
    labels: tuple[int, ...]
    """Of each job of the graph, its micro-batch."""

    @property
    def makespan(self) -> int:
        return self.run.makespan

    @cached_property
    def paths(self) -> tuple[tuple[Visit, ...], ...]:
        """The visits of each micro-batch."""
        return tuple(
            path for _, path in sorted(zip(self.labels, self.job_paths, strict=True), key=lambda pair: pair[0])
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Share of the step in which each stage works."""
        work = [0] * self.graph.stages
        for stage, duration in zip(self.graph.stage, self.graph.duration, strict=True):
            work[stage] += duration
        return tuple(time / self.makespan if self.makespan else 1.0 for time in work)

    @property
    def busy_share(self) -> float:
        """Work done / (stages x makespan)."""
        return sum(self.busy) / len(self.busy)

    @cached_property
    def peak_held(self) -> tuple[int, ...]:
        """Most bytes that each stage holds between forward and backward passes."""
        now, peak = [0] * self.graph.stages, [0] * self.graph.stages
        takes = self._takes
        for event in self.run.log:
            if event >= 0:
                stage = self.graph.stage[event]
                now[stage] += takes[event]
                peak[stage] = max(peak[stage], now[stage])
            else:
                now[self.graph.stage[-1 - event]] -= self.graph.held[-1 - event]
        return tuple(peak)

    @cached_property
    def bounds(self) -> Bounds:
        """What no schedule of these micro-batches on this placement beats."""
        return bounds(self.graph)

    def spans(self) -> list[Span]:
        """All passes, by start."""
        graph, spans = self.graph, []
        for operation in (event for event in self.run.log if event >= 0):
            micro_batch, visit = self._visit(operation)
            end = self.run.end[operation]
            start = end - graph.duration[operation]
            spans.append(Span(graph.stage[operation], micro_batch, visit, graph.backward[operation], start, end))
        return spans

    def program(self, stage: int) -> list[Operation]:
        """What the stage does, in order. A receive comes before the pass that needs it, a send right after its own."""
        graph, program = self.graph, []
        place, backward = graph.stage, graph.backward
        for event in self.run.log:
            if event >= 0:
                if place[event] == stage:
                    kind = "backward" if backward[event] else "forward"
                    program.append(Operation(kind, *self._visit(event)))
                continue
            done = -1 - event
            for later in graph.after[done]:
                ends = place[done], place[later]
                if ends[0] != ends[1] and stage in ends:
                    kind, peer = ("send", ends[1]) if ends[0] == stage else ("receive", ends[0])
                    if backward[done]:
                        program.append(Operation(kind, *self._visit(done), "gradient", peer))
                    else:
                        program.append(Operation(kind, *self._visit(later), "activation", peer))
        return program

    def relabelled(self, depths: Sequence[int]) -> Plan:
        """The same step for micro-batches with the same depths in another order."""
        assert sorted(depths) == sorted(self.depths), (depths, self.depths)
        return replace(self, depths=tuple(depths), labels=_by_depth(depths))

    def _visit(self, operation: int) -> tuple[int, int]:
        """Micro-batch and visit of a pass."""
        job = self.graph.job[operation]
        local = operation - self.graph.first[job]
        path = len(self.job_paths[job])
        return self.labels[job], local - path if local >= path else local

    @cached_property
    def _takes(self) -> list[int]:
        """What each forward pass takes into memory."""
        takes = [0] * len(self.graph.stage)
        for operation, amount in enumerate(self.graph.held):
            if self.graph.backward[operation]:
                takes[operation - len(self.job_paths[self.graph.job[operation]])] = amount
        return takes


def plan(
    placement: Placement,
    depths: Sequence[int],
    costs: Costs,
    limits: Limits = USUAL_LIMITS,
    *,
    forward_only: bool = False,
    exits: Sequence[int] = (),
    effort: int | None = None,
) -> Plan:
    """Plan one step: micro-batch i goes through the core `depths[i]` ≥ 0 times.

    `exits` lets h^(k) leave for coda and head for each k of it below the depth, besides the end. `effort` is how many
    steps are simulated in search of a short one (None: `quick_effort`). Raises `UserError` where a micro-batch alone
    exceeds `limits`.
    """
    assert depths and min(depths) >= 0, depths
    rising = sorted(depths)
    by_depth = {depth: visits(placement, depth, exits) for depth in sorted(set(depths))}
    tasks = {depth: tuple(_task(visit, costs) for visit in path) for depth, path in by_depth.items()}
    graph = build_graph([tasks[depth] for depth in rising], placement.stages, forward_only=forward_only, hop=costs.hop)
    if limits.held is not None:
        _check_fit(graph, rising, limits.held)
    effort = quick_effort(placement.stages) if effort is None else effort
    found = search(graph, limits.caps(placement.stages), effort, held=limits.held)
    return Plan(
        placement,
        tuple(depths),
        forward_only,
        found.in_flight,
        graph,
        found.run,
        tuple(by_depth[depth] for depth in rising),
        _by_depth(depths),
    )


class Planner:
    """Plans of a run's steps: one per multiset of depths, the most recent ones kept."""

    def __init__(
        self,
        placement: Placement,
        costs: Costs,
        limits: Limits = USUAL_LIMITS,
        *,
        effort: int | None = None,
        kept: int = 32,
    ) -> None:
        self.placement, self.costs, self.limits, self.effort, self.kept = placement, costs, limits, effort, kept
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()

    def plan(self, depths: Sequence[int], *, forward_only: bool = False, exits: Sequence[int] = ()) -> Plan:
        """As `plan`, at no cost where the same depths were planned before, in whatever order."""
        key = (tuple(sorted(depths)), forward_only, tuple(exits))
        if key not in self._plans:
            self._plans[key] = plan(
                self.placement,
                key[0],
                self.costs,
                self.limits,
                forward_only=forward_only,
                exits=exits,
                effort=self.effort,
            )
            if len(self._plans) > self.kept:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key].relabelled(depths)


def _task(visit: Visit, costs: Costs) -> Task:
    cost = costs.of(visit)
    return Task(visit.stage, cost.forward, cost.backward, cost.held, visit.parent)


def _by_depth(depths: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches by rising depth: the jobs of a plan."""
    return tuple(sorted(range(len(depths)), key=depths.__getitem__))


def _check_fit(graph: Graph, depths: Sequence[int], held: Sequence[int]) -> None:
    for depth, holds in zip(depths, needs(graph), strict=True):
        for stage, (need, limit) in enumerate(zip(holds, held, strict=True)):
            if need > limit:
                raise UserError(
                    f"pipeline stage {stage} would hold {need / 1e9:.3g} GB of activations for one micro-batch of "
                    f"depth {depth}, its limit is {limit / 1e9:.3g} GB: use a smaller --micro-batch-size, "
                    "--recompute step, or another --pipeline-placement"
                )
