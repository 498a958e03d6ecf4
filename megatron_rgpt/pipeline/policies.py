"""Search for a short step: list policies, justification from both ends, then local search. Deterministic.

A policy gives each operation an urgency and the simulator does the rest. Justification (Valls et al. 2005, for project
scheduling) runs the step backwards in time, most urgent what ended last, then forwards again, most urgent what the
mirrored step ended last; it closes gaps that no fixed priority sees. Local search shakes the order of the best step
and justifies again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple

from megatron_rgpt.pipeline.graph import Graph, bounds, reversed_graph
from megatron_rgpt.pipeline.simulate import Run, run

SHAKES = (0.005, 0.01, 0.02, 0.04)
"""Standard deviations of a shake, in makespans."""
JOB_MOVES, JOB_SHIFT = 0.6, 0.1
"""Share of the moves that shift one job as a whole, and their standard deviation in makespans."""
SHAKEN_SHARES = (0.05, 0.2, 1.0)
"""Shares of the operations that a shake moves."""


POLICIES_SHARE, JUSTIFICATION_SHARE = 0.4, 0.6
"""Shares of the effort after which no further policy, and no further justification of the best ones, begins."""
JUSTIFIED_ON = 4


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


class Trial(NamedTuple):
    """A simulated step, and the cap of jobs in flight under which it runs."""

    makespan: int
    number: int
    """Of the trial, so that equal steps keep their order."""
    in_flight: int
    run: Run


def search(
    graph: Graph, caps: Sequence[int], effort: int, *, held: Sequence[int] | None = None, seed: int = 0
) -> Trial:
    """The shortest step found within `effort` simulated steps (at least one), over these caps of jobs in flight.

    The first cap is tried first. `held` limits what each stage holds. `seed` is the local search's.
    """
    trials = _Trials(graph, effort, held)
    found = sorted(_try_policies(trials, caps))
    if trials.left >= 2 and found[0].makespan > bounds(graph).best:
        found = sorted(_justify_on(trials, trial) for trial in found[:JUSTIFIED_ON])
        return _shake_on(trials, found[0], seed)
    return found[0]


class _Trials:
    """Simulated steps of one graph, counted."""

    def __init__(self, graph: Graph, effort: int, held: Sequence[int] | None) -> None:
        self.graph, self.mirror = graph, reversed_graph(graph)
        self.effort, self.left, self.held = effort, effort, held

    @property
    def spent(self) -> float:
        """Share of the effort."""
        return 1 - self.left / self.effort

    def step(self, urgency: Sequence[float], cap: int) -> Trial:
        self.left -= 1
        simulated = run(self.graph, urgency, cap, self.held)
        return Trial(simulated.makespan, -self.left, cap, simulated)

    def justified(self, trial: Trial) -> Trial:
        """The trial's step, run backwards and forwards again."""
        self.left -= 1
        mirrored = run(self.mirror, [-end for end in trial.run.end], trial.in_flight)
        return self.step([-end for end in mirrored.end], trial.in_flight)


def _try_policies(trials: _Trials, caps: Sequence[int]) -> Iterator[Trial]:
    """Each policy under each cap, while effort lasts, and justified once."""
    for number, (cap, policy) in enumerate(product(dict.fromkeys(caps), POLICIES)):
        if number and trials.spent >= POLICIES_SHARE:
            return
        trial = trials.step(urgencies(trials.graph, policy), cap)
        yield min(trial, trials.justified(trial)) if trials.left >= 2 else trial


def _justify_on(trials: _Trials, trial: Trial) -> Trial:
    """The best of a chain of justifications that ends when two in a row bring nothing."""
    current, best, stale = trial, trial, 0
    while stale < 2 and trials.left >= 2 and trials.spent < JUSTIFICATION_SHARE:
        current = trials.justified(current)
        stale += 1
        if current.makespan < best.makespan:
            best, stale = current, 0
    return best


def _shake_on(trials: _Trials, trial: Trial, seed: int) -> Trial:
    """The best that shaking and justifying reaches, until effort ends or nothing can be shorter."""
    limit = bounds(trials.graph).best
    current, best, generator = trial, trial, random.Random(seed)
    while trials.left >= 3 and best.makespan > limit:
        shaken = trials.step(_shaken(trials.graph, current.run, generator), trial.in_flight)
        shaken = min(shaken, trials.justified(shaken))
        if shaken.makespan <= current.makespan:
            current = shaken
        best = min(best, current)
    return best


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


def _shaken(graph: Graph, step: Run, generator: random.Random) -> list[float]:
    """The ends of a step, as urgencies, with one job moved as a whole or noise on some operations."""
    ends: list[float] = list(step.end)
    if generator.random() < JOB_MOVES:
        job = generator.randrange(graph.jobs)
        shift = generator.gauss(0, JOB_SHIFT * step.makespan)
        for operation in range(graph.first[job], graph.first[job] + graph.size(job)):
            ends[operation] += shift
        return ends
    spread = step.makespan * generator.choice(SHAKES)
    share = generator.choice(SHAKEN_SHARES)
    return [end + generator.gauss(0, spread) if generator.random() < share else end for end in ends]
