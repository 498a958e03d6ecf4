"""A step of a pipeline in simulated time: stages run operations one at a time, whatever is most urgent and ready.

Pure: it knows jobs and stages, not models. A job is a micro-batch's tree of tasks; each task runs forward once its
parent has, and backward once its children have (a leaf: once it ran forward itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


class Task(NamedTuple):
    """A visit as the simulator sees it: times of its two passes, and what is held in between."""

    stage: int
    forward: int
    backward: int
    held: int
    parent: int | None


Job = tuple[Task, ...]


@dataclass(frozen=True)
class Graph:
    """All operations of a step, numbered: those of job j are `first[j]`..., its forward passes before its backwards."""

    stages: int
    stage: list[int]
    duration: list[int]
    after: list[tuple[int, ...]]
    """Operations that wait for this one."""
    waits: list[int]
    """For how many operations each one waits."""
    job: list[int]
    first: list[int]
    sources: list[tuple[int, ...]]
    """Of each job, the operations that wait for none."""
    backward: list[bool]
    held: list[int]
    """What a backward pass lets go, and its forward pass took; 0 at forward passes and without backward."""
    hop: int

    @property
    def jobs(self) -> int:
        return len(self.sources)

    def size(self, job: int) -> int:
        return (self.first[job + 1] if job + 1 < self.jobs else len(self.stage)) - self.first[job]


class Run(NamedTuple):
    """What came of a simulated step."""

    makespan: int
    start: list[int]
    log: list[int]
    """What happened, in order: operation o starts (o), or is complete (-1 - o)."""


def build_graph(jobs: Sequence[Job], stages: int, *, forward_only: bool = False, hop: int = 0) -> Graph:
    """The operations of a step over these jobs; `hop` is the time between two stages."""
    graph = Graph(stages, [], [], [], [], [], [], [], [], [], hop)
    templates: dict[Job, tuple[list, ...]] = {}
    for number, tasks in enumerate(jobs):
        if tasks not in templates:
            templates[tasks] = _template(tasks, forward_only)
        stage, duration, after, waits, held = templates[tasks]
        base = len(graph.stage)
        graph.first.append(base)
        graph.stage.extend(stage)
        graph.duration.extend(duration)
        graph.after.extend([tuple([base + o for o in later]) for later in after])
        graph.waits.extend(waits)
        graph.held.extend(held)
        graph.job.extend([number] * len(stage))
        graph.backward.extend([False] * len(tasks) + [True] * (len(stage) - len(tasks)))
        graph.sources.append((base,))
    return graph


def _template(tasks: Job, forward_only: bool) -> tuple[list, ...]:
    n = len(tasks)
    children: list[list[int]] = [[] for _ in tasks]
    for task, (_, _, _, _, parent) in enumerate(tasks):
        if parent is not None:
            children[parent].append(task)
    stage = [task.stage for task in tasks]
    duration = [task.forward for task in tasks]
    after = [tuple(below) for below in children]
    waits = [0] + [1] * (n - 1)
    held = [0] * n
    if not forward_only:
        after = [below or (n + task,) for task, below in enumerate(after)]
        stage += stage
        duration += [task.backward for task in tasks]
        after += [() if task.parent is None else (n + task.parent,) for task in tasks]
        waits += [len(below) or 1 for below in children]
        held += [task.held for task in tasks]
    return stage, duration, after, waits, held


def reversed_graph(graph: Graph) -> Graph:
    """The same step run from its end to its start: a schedule of it, mirrored, is one of the graph."""
    before: list[list[int]] = [[] for _ in graph.stage]
    for operation, later in enumerate(graph.after):
        for o in later:
            before[o].append(operation)
    sources: list[list[int]] = [[] for _ in graph.sources]
    for operation, later in enumerate(graph.after):
        if not later:
            sources[graph.job[operation]].append(operation)
    return Graph(
        graph.stages,
        graph.stage,
        graph.duration,
        [tuple(o) for o in before],
        [len(later) for later in graph.after],
        graph.job,
        graph.first,
        [tuple(o) for o in sources],
        graph.backward,
        [0] * len(graph.stage),
        graph.hop,
    )


def run(graph: Graph, urgency: Sequence[float], in_flight: int, held: Sequence[int] | None = None) -> Run:
    """Run a step. Of the ready operations a free stage takes the one of the least `urgency` value.

    Jobs enter in the order of their first operation's urgency, at most `in_flight` at a time. `held` limits what each
    stage holds: a job enters when all it will ever hold fits beside what those in flight still may, which can neither
    exceed the limit nor block. Each job must fit alone (`needs`).
    """
    stage, duration, after = graph.stage, graph.duration, graph.after
    # ranks instead of urgencies: whole numbers compare fastest, and ties are broken once and for all
    by_rank = sorted(range(len(stage)), key=urgency.__getitem__)
    rank = [0] * len(stage)
    for position, operation in enumerate(by_rank):
        rank[operation] = position
    waits = graph.waits.copy()
    left = [graph.size(job) for job in range(graph.jobs)]
    entering = sorted(range(graph.jobs), key=lambda job: min(rank[o] for o in graph.sources[job]), reverse=True)
    holds = None if held is None else needs(graph)
    free = None if held is None else list(held)
    ready: list[list[int]] = [[] for _ in range(graph.stages)]
    idle = [True] * graph.stages
    events: list[tuple[int, int]] = []
    start = [0] * len(stage)
    log: list[int] = []
    arrival, hop, now, inside = len(stage), graph.hop, 0, 0
    job_of, let_go = graph.job, graph.held
    places = range(graph.stages)

    def enter() -> None:
        nonlocal inside
        while entering and inside < in_flight:
            job = entering[-1]
            if holds is not None:
                if any(need > room for need, room in zip(holds[job], free, strict=True)):
                    assert inside, f"job {job} does not fit: it holds {holds[job]}, the limits are {held}"
                    return
                for place in places:
                    free[place] -= holds[job][place]
            entering.pop()
            inside += 1
            for source in graph.sources[job]:
                heappush(ready[stage[source]], rank[source])

    enter()
    while True:
        for place in places:
            if idle[place] and ready[place]:
                operation = by_rank[heappop(ready[place])]
                idle[place] = False
                start[operation] = now
                log.append(operation)
                heappush(events, (now + duration[operation], operation))
        if not events:
            break
        now, operation = heappop(events)
        while True:
            if operation >= arrival:
                operation -= arrival
                waits[operation] -= 1
                if not waits[operation]:
                    heappush(ready[stage[operation]], rank[operation])
            else:
                place = stage[operation]
                idle[place] = True
                log.append(-1 - operation)
                for later in after[operation]:
                    if hop and stage[later] != place:
                        heappush(events, (now + hop, arrival + later))
                    elif waits[later] == 1:
                        heappush(ready[stage[later]], rank[later])
                    else:
                        waits[later] -= 1
                job = job_of[operation]
                left[job] -= 1
                if free is not None:
                    free[place] += let_go[operation]
                if not left[job]:
                    inside -= 1
                if entering and (not left[job] or free is not None):
                    enter()
            if not events or events[0][0] != now:
                break
            now, operation = heappop(events)
    assert not any(left), "operations that never became ready"
    return Run(now, start, log)


def needs(graph: Graph) -> list[list[int]]:
    """Per job and stage, the most it holds: all that its backward passes let go."""
    holds = [[0] * graph.stages for _ in range(graph.jobs)]
    for operation, amount in enumerate(graph.held):
        holds[graph.job[operation]][graph.stage[operation]] += amount
    return holds
