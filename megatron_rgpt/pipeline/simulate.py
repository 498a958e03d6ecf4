"""A step of a pipeline in simulated time: stages run operations one at a time, whatever is most urgent and ready."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from megatron_rgpt.pipeline.graph import Graph, needs


class Run(NamedTuple):
    """What came of a simulated step."""

    makespan: int
    end: list[int]
    """Of each operation."""
    log: list[int]
    """What happened, in order: operation o starts (o), or is complete (-1 - o)."""


def run(graph: Graph, urgency: Sequence[float], in_flight: int, held: Sequence[int] | None = None) -> Run:
    """Run a step. Of the ready operations a free stage takes the one of the least `urgency` value.

    Jobs enter in the order of their first operation's urgency, at most `in_flight` at a time. `held` limits what each
    stage holds: a job enters when all it will ever hold fits beside what those in flight still may, which can neither
    exceed the limit nor block. Each job must fit alone (`needs`).
    """
    stage, duration, after = graph.stage, graph.duration, graph.after
    # ranks instead of urgencies: whole numbers compare fastest, and ties are broken once and for all
    by_rank = np.argsort(np.asarray(urgency), kind="stable").tolist()
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
    end = [0] * len(stage)
    log: list[int] = []
    arrival, hop, now, inside = len(stage), graph.hop, 0, 0
    job_of, let_go = graph.job, graph.held
    # stages where something changed since operations were last started
    touched: list[int] = []

    def enter() -> None:
        nonlocal inside
        while entering and inside < in_flight:
            job = entering[-1]
            if holds is not None:
                if any(need > room for need, room in zip(holds[job], free, strict=True)):
                    assert inside, f"job {job} does not fit: it holds {holds[job]}, the limits are {held}"
                    return
                for place, need in enumerate(holds[job]):
                    free[place] -= need
            entering.pop()
            inside += 1
            for source in graph.sources[job]:
                heappush(ready[stage[source]], rank[source])
                touched.append(stage[source])

    enter()
    while True:
        for place in touched:
            if idle[place] and ready[place]:
                operation = by_rank[heappop(ready[place])]
                idle[place] = False
                log.append(operation)
                end[operation] = finish = now + duration[operation]
                heappush(events, (finish, operation))
        if not events:
            break
        touched.clear()
        now, operation = heappop(events)
        while True:
            if operation >= arrival:
                operation -= arrival
                waits[operation] -= 1
                if not waits[operation]:
                    heappush(ready[stage[operation]], rank[operation])
                    touched.append(stage[operation])
            else:
                place = stage[operation]
                idle[place] = True
                touched.append(place)
                log.append(-1 - operation)
                for later in after[operation]:
                    if hop and stage[later] != place:
                        heappush(events, (now + hop, arrival + later))
                    elif waits[later] == 1:
                        heappush(ready[stage[later]], rank[later])
                        touched.append(stage[later])
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
    return Run(now, end, log)
