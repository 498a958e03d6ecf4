"""Stages that run their programs literally: with transfers that block at both ends, and in time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megatron_rgpt.pipeline.costs import Costs
from megatron_rgpt.pipeline.schedule import Operation, Plan


@dataclass
class Execution:
    """What the stages did: passes in the order they ran, and what each stage held and had in flight at most."""

    forwards: list[tuple[int, int]] = field(default_factory=list)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    peak_held: list[int] = field(default_factory=list)
    peak_in_flight: list[int] = field(default_factory=list)
    transfers: list[tuple] = field(default_factory=list)


def run_with_rendezvous(plan: Plan, costs: Costs) -> Execution:
    """Run all programs; a send and its receive go on only together. Fails where a stage is stuck or lacks an input."""
    stages = plan.placement.stages
    programs = [plan.program(stage) for stage in range(stages)]
    at = [0] * stages
    done, held = Execution(peak_held=[0] * stages, peak_in_flight=[0] * stages), [0] * stages
    in_flight: list[dict[int, int]] = [defaultdict(int) for _ in range(stages)]
    inputs: set[tuple] = set()
    progress = True
    while progress:
        progress = False
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                operation = programs[stage][at[stage]]
                if operation.kind in ("send", "receive"):
                    peer = operation.peer
                    if at[peer] == len(programs[peer]) or not _match(operation, stage, programs[peer][at[peer]], peer):
                        break
                    at[peer] += 1
                    source, target = (stage, peer) if operation.kind == "send" else (peer, stage)
                    data = (operation.payload, operation.micro_batch, operation.visit)
                    assert (source, *data) in inputs, f"stage {source} sends what it does not have: {data}"
                    inputs.add((target, *data))
                    done.transfers.append(data)
                else:
                    _compute(plan, costs, stage, operation, inputs, done, held, in_flight[stage])
                at[stage] += 1
                progress = True
    stuck = [(stage, programs[stage][at[stage]]) for stage in range(stages) if at[stage] < len(programs[stage])]
    assert not stuck, f"deadlock at {stuck}"
    assert not any(held), f"activations never let go: {held}"
    return done


def _match(one: Operation, one_stage: int, other: Operation, other_stage: int) -> bool:
    return (
        {one.kind, other.kind} == {"send", "receive"}
        and one[1:4] == other[1:4]
        and (one.peer, other.peer) == (other_stage, one_stage)
    )


def _compute(plan, costs, stage, operation, inputs, done, held, in_flight) -> None:
    micro_batch, number = operation.micro_batch, operation.visit
    path = plan.paths[micro_batch]
    visit = path[number]
    assert visit.stage == stage, f"{operation} belongs to stage {visit.stage}"
    children = [child for child, below in enumerate(path) if below.parent == number]
    assert tuple(children) == visit.children
    if operation.kind == "forward":
        assert visit.parent is None or (stage, "activation", micro_batch, number) in inputs, f"{operation}: no input"
        inputs.update((stage, "activation", micro_batch, child) for child in children)
        done.forwards.append((micro_batch, number))
        if not plan.forward_only:
            held[stage] += costs.of(visit).held
            in_flight[micro_batch] += 1
    else:
        assert (micro_batch, number) in done.forwards, f"{operation} before its forward pass"
        for child in children:
            assert (stage, "gradient", micro_batch, child) in inputs, f"{operation}: no gradient of visit {child}"
        inputs.add((stage, "gradient", micro_batch, number))
        done.backwards.append((micro_batch, number))
        held[stage] -= costs.of(visit).held
        in_flight[micro_batch] -= 1
    done.peak_held[stage] = max(done.peak_held[stage], held[stage])
    # a micro-batch may be between two visits of a stage: it still is in flight until all its forwards are undone
    done.peak_in_flight[stage] = max(done.peak_in_flight[stage], sum(count > 0 for count in in_flight.values()))


def time_of_execution(plan: Plan, costs: Costs) -> int:
    """When the last stage is done, if passes take their costs, run in program order, and transfers wait for no one."""
    stages = plan.placement.stages
    programs = [plan.program(stage) for stage in range(stages)]
    at, clock = [0] * stages, [0] * stages
    arrival: dict[tuple, int] = {}
    progress = True
    while progress:
        progress = False
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                operation = programs[stage][at[stage]]
                data = (operation.payload, operation.micro_batch, operation.visit)
                if operation.kind == "send":
                    arrival[data] = clock[stage] + costs.hop
                elif operation.kind in ("forward", "backward"):
                    path = plan.paths[operation.micro_batch]
                    visit = path[operation.visit]
                    if operation.kind == "forward":
                        needs, cost = [("activation", operation.micro_batch, operation.visit)], costs.of(visit).forward
                        needs = [] if visit.parent is None or path[visit.parent].stage == stage else needs
                    else:
                        needs = [
                            ("gradient", operation.micro_batch, child)
                            for child, below in enumerate(path)
                            if below.parent == operation.visit and below.stage != stage
                        ]
                        cost = costs.of(visit).backward
                    if any(need not in arrival for need in needs):
                        break
                    clock[stage] = max([clock[stage], *(arrival[need] for need in needs)]) + cost
                at[stage] += 1
                progress = True
    assert all(place == len(program) for place, program in zip(at, programs, strict=True))
    return max(clock)
