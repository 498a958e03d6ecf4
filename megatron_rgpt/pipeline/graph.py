"""The operations of one step of a pipeline, and what waits for what.

Pure: it knows jobs and stages, not models. A job is a micro-batch's tree of tasks; each task runs forward once its
parent has, and backward once its children have (a leaf: once it ran forward itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Task(NamedTuple):
    """A visit as the simulator sees it: times of its two passes, and what is held in between."""

    stage: int
    forward: int
    backward: int
    held: int
    parent: int | None
    """An earlier task of the job, or None at the first."""


Job = tuple[Task, ...]


@dataclass(frozen=True)
class Graph:
    """All operations of a step, numbered: those of job j are `first[j]`..., its forward passes before its backwards."""

    stages: int
    hop: int
    """Time from the end of an operation until its output is at another stage."""
    stage: list[int]
    duration: list[int]
    after: list[tuple[int, ...]]
    """Operations that wait for this one."""
    waits: list[int]
    """For how many operations each one waits."""
    backward: list[bool]
    held: list[int]
    """What a backward pass lets go, and its forward pass took; 0 at forward passes and without backward."""
    head: list[int]
    """The longest way from the job's start to the operation's start."""
    tail: list[int]
    """The longest way from the operation's start to the job's end."""
    job: list[int]
    first: list[int]
    sources: list[tuple[int, ...]]
    """Of each job, the operations that wait for none."""

    @property
    def jobs(self) -> int:
        return len(self.sources)

    def size(self, job: int) -> int:
        return (self.first[job + 1] if job + 1 < self.jobs else len(self.stage)) - self.first[job]


def build_graph(jobs: Sequence[Job], stages: int, *, forward_only: bool = False, hop: int = 0) -> Graph:
    """The operations of a step over these jobs; `hop` is the time between two stages."""
    graph = Graph(stages, hop, [], [], [], [], [], [], [], [], [], [], [])
    alone: dict[Job, Graph] = {}
    for number, tasks in enumerate(jobs):
        if tasks not in alone:
            alone[tasks] = _one_job(tasks, stages, forward_only, hop)
        one, base = alone[tasks], len(graph.stage)
        for name in ("stage", "duration", "waits", "backward", "held", "head", "tail"):
            getattr(graph, name).extend(getattr(one, name))
        graph.after.extend([tuple([base + o for o in later]) for later in one.after])
        graph.job.extend([number] * len(one.stage))
        graph.first.append(base)
        graph.sources.append((base,))
    return graph


def _one_job(tasks: Job, stages: int, forward_only: bool, hop: int) -> Graph:
    n = len(tasks)
    children: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        if task.parent is not None:
            children[task.parent].append(number)
    stage = [task.stage for task in tasks]
    duration = [task.forward for task in tasks]
    after = [tuple(below) for below in children]
    waits = [0] + [1] * (n - 1)
    held = [0] * n
    order = list(range(n))
    if not forward_only:
        after = [below or (n + number,) for number, below in enumerate(after)]
        after += [() if task.parent is None else (n + task.parent,) for task in tasks]
        stage += stage
        duration += [task.backward for task in tasks]
        waits += [len(below) or 1 for below in children]
        held += [task.held for task in tasks]
        order += range(2 * n - 1, n - 1, -1)
    backward = [operation >= n for operation in range(len(stage))]
    head, tail = [0] * len(stage), duration.copy()
    for operation in order:
        for later in after[operation]:
            way = duration[operation] + (hop if stage[later] != stage[operation] else 0)
            head[later] = max(head[later], head[operation] + way)
    for operation in reversed(order):
        for later in after[operation]:
            way = duration[operation] + (hop if stage[later] != stage[operation] else 0)
            tail[operation] = max(tail[operation], way + tail[later])
    return Graph(stages, hop, stage, duration, after, waits, backward, held, head, tail, [0] * len(stage), [0], [(0,)])


def reversed_graph(graph: Graph) -> Graph:
    """The same step run from its end to its start: a schedule of it, mirrored, is one of the graph. Nothing is held."""
    before: list[list[int]] = [[] for _ in graph.stage]
    sources: list[list[int]] = [[] for _ in graph.sources]
    for operation, later in enumerate(graph.after):
        for o in later:
            before[o].append(operation)
        if not later:
            sources[graph.job[operation]].append(operation)
    return replace(
        graph,
        after=[tuple(o) for o in before],
        waits=[len(later) for later in graph.after],
        held=[0] * len(graph.stage),
        head=[way - time for way, time in zip(graph.tail, graph.duration, strict=True)],
        tail=[way + time for way, time in zip(graph.head, graph.duration, strict=True)],
        sources=[tuple(o) for o in sources],
    )


def needs(graph: Graph) -> list[list[int]]:
    """Per job and stage, the most that is held: all that its backward passes let go."""
    holds = [[0] * graph.stages for _ in range(graph.jobs)]
    for operation, amount in enumerate(graph.held):
        holds[graph.job[operation]][graph.stage[operation]] += amount
    return holds


class Bounds(NamedTuple):
    """Times no schedule of a step can beat."""

    work: float
    """Total work / P."""
    longest_path: int
    stage: int
    """The busiest stage's work, with the shortest way that leads to it and away from it."""

    @property
    def best(self) -> float:
        return max(self)


def bounds(graph: Graph) -> Bounds:
    """Lower bounds of the makespan."""
    load, lead, trail = [0] * graph.stages, {}, {}
    for place, time, head, tail in zip(graph.stage, graph.duration, graph.head, graph.tail, strict=True):
        load[place] += time
        lead[place] = min(lead.get(place, head), head)
        trail[place] = min(trail.get(place, tail - time), tail - time)
    return Bounds(
        sum(load) / graph.stages,
        max(graph.tail),
        max(lead[place] + load[place] + trail[place] for place in lead),
    )
