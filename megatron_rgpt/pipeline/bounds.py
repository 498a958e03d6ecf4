"""Times that no schedule of a step can beat, from its operations alone."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rgpt.pipeline.simulate import Graph, reversed_graph


def heads(graph: Graph) -> list[int]:
    """For each operation, the longest way from its job's start to its own start."""
    head = [0] * len(graph.stage)
    waits = graph.waits.copy()
    ready = [o for sources in graph.sources for o in sources]
    while ready:
        operation = ready.pop()
        end = head[operation] + graph.duration[operation]
        for later in graph.after[operation]:
            way = end + (graph.hop if graph.stage[later] != graph.stage[operation] else 0)
            head[later] = max(head[later], way)
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return head


def tails(graph: Graph) -> list[int]:
    """For each operation, the longest way from its start to its job's end."""
    return [way + time for way, time in zip(heads(reversed_graph(graph)), graph.duration, strict=True)]


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
    head, tail = heads(graph), tails(graph)
    load, lead, trail = [0] * graph.stages, {}, {}
    for operation, place in enumerate(graph.stage):
        load[place] += graph.duration[operation]
        lead[place] = min(lead.get(place, head[operation]), head[operation])
        after = tail[operation] - graph.duration[operation]
        trail[place] = min(trail.get(place, after), after)
    return Bounds(
        sum(load) / graph.stages,
        max(tail, default=0),
        max((lead[place] + load[place] + trail[place] for place in lead), default=0),
    )
