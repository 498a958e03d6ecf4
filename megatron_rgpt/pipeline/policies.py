"""Search for a short step: list policies, justification from both ends, then local search. Deterministic.

A policy gives each operation an urgency and the simulator does the rest. Justification (Valls et al. 2005, for project
scheduling) runs the step backwards in time, most urgent what ended last, then forwards again, most urgent what the
mirrored schedule starts first; it closes gaps that no fixed priority sees. Local search shakes the best start times and
justifies again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rgpt.pipeline.graph import Graph, bounds, reversed_graph
from megatron_rgpt.pipeline.simulate import Run, run

SHAKES = (0.005, 0.01, 0.02, 0.04)
"""Standard deviations of a shake, in makespans."""
SHAKEN_SHARES = (0.05, 0.2, 1.0)
"""Shares of the operations that a shake moves."""


class Policy(NamedTuple):
    """Weights of an operation's urgency; the least goes first.

    -path · (way left / longest way) + order · (place in the order of entry, 0 to 1) + backward · (1 at backward passes)
    """

    entry: Literal["short first", "long first", "alternating"]
    path: float
    order: float
    backward: float


POLICIES = (
    # in the order of what each adds to the ones before it, over rings of P 2-8 and m 8-64
    Policy("alternating", 0.3, 2.5, 1.0),
    Policy("alternating", 0.3, 1.5, 0.5),
    Policy("long first", 0.3, 2.5, 1.0),
    Policy("short first", 1.0, 1.0, 0.0),  # the best on unrolled chains, whose jobs differ most
    Policy("alternating", 0.0, 1.5, 1.0),
    Policy("long first", 1.0, 1.0, 0.0),
    Policy("alternating", 0.7, 1.5, 1.0),
    Policy("alternating", 0.7, 2.5, 0.5),
    Policy("short first", 1.0, 0.0, 0.0),  # critical path
    Policy("alternating", 0.0, 1.5, -0.3),
    Policy("long first", 0.7, 1.5, 0.5),
    Policy("short first", 0.0, 1.0, -2.0),  # backward first, as in 1F1B
    Policy("long first", 0.0, 1.0, -2.0),
)


@dataclass(frozen=True)
class Search:
    """The best step found, the cap it ran under, and what each phase of the search reached (makespans)."""

    run: Run
    in_flight: int
    by_policies: int
    by_justification: int


def search(graph: Graph, caps: Sequence[int], effort: int, *, held: Sequence[int] | None = None) -> Search:
    """The shortest step found within `effort` simulated steps (at least one), over these caps of jobs in flight.

    The first cap is tried first. `held` limits what each stage holds.
    """
    mirror = reversed_graph(graph)
    spent = 0

    def forward(urgency: Sequence[float], cap: int) -> Run:
        nonlocal spent
        spent += 1
        return run(graph, urgency, cap, held)

    def justify(step: Run, cap: int) -> Run:
        nonlocal spent
        spent += 1
        mirrored = run(mirror, [-end for end in _ends(graph, step)], cap)
        return forward([-end for end in _ends(mirror, mirrored)], cap)

    found: list[tuple[int, int, int, Run]] = []
    shortest = None
    for cap in dict.fromkeys(caps):
        for policy in POLICIES:
            if spent and spent >= 0.4 * effort:
                break
            first = forward(urgencies(graph, policy), cap)
            shortest = min(shortest or first.makespan, first.makespan)
            second = justify(first, cap) if spent + 2 <= effort else first
            best = min(first, second, key=lambda step: step.makespan)
            found.append((best.makespan, len(found), cap, best))
    found.sort(key=lambda entry: entry[:2])
    assert shortest is not None
    if spent + 2 > effort:
        return Search(found[0][3], found[0][2], shortest, found[0][0])
    limit = bounds(graph).best
    improved = []
    for _, number, cap, best in found[:4]:
        current, stale = best, 0
        while stale < 2 and spent + 2 <= 0.6 * effort and best.makespan > limit:
            current = justify(current, cap)
            stale += 1
            if current.makespan < best.makespan:
                best, stale = current, 0
        improved.append((best.makespan, number, cap, best))
    makespan, _, cap, best = min(improved, key=lambda entry: entry[:2])
    current, generator = best, random.Random(0)
    while spent + 3 <= effort and best.makespan > limit:
        shaken = forward(_shake(current, generator), cap)
        shaken = min(shaken, justify(shaken, cap), key=lambda step: step.makespan)
        if shaken.makespan <= current.makespan:
            current = shaken
        best = min(best, current, key=lambda step: step.makespan)
    return Search(best, cap, shortest, makespan)


def urgencies(graph: Graph, policy: Policy) -> list[float]:
    """The urgency of each operation under a policy."""
    path = [graph.head[first] + graph.tail[first] for first in graph.first]
    order = sorted(range(graph.jobs), key=path.__getitem__)
    if policy.entry == "long first":
        order.reverse()
    elif policy.entry == "alternating":
        order = [job for pair in zip(order[::-1], order, strict=True) for job in pair][: graph.jobs]
    place = [0.0] * graph.jobs
    for position, job in enumerate(order):
        # the last term breaks ties between jobs of one depth
        place[job] = (policy.order + 1e-6) * position / graph.jobs
    path_weight = policy.path / max(*path, 1)
    return [
        place[job] - path_weight * way + policy.backward * backward
        for way, job, backward in zip(graph.tail, graph.job, graph.backward, strict=True)
    ]


def _ends(graph: Graph, step: Run) -> list[int]:
    return [start + duration for start, duration in zip(step.start, graph.duration, strict=True)]


def _shake(step: Run, generator: random.Random) -> list[float]:
    """Start times with noise on some."""
    spread = step.makespan * generator.choice(SHAKES)
    share = generator.choice(SHAKEN_SHARES)
    return [start + generator.gauss(0, spread) if generator.random() < share else start for start in step.start]
