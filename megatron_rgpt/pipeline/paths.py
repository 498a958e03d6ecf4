"""The path of a micro-batch through the stages: a tree of visits, as the engine runs them and the scheduler times them.

    hub: prelude, anchor, project 1, core 1 → the stages' shares of core 1 → hub: gate 1, project 2, core 2 → …
    → hub: gate r, coda → the stages' shares of the coda → hub: head

A visit is one stage's work between two hops. h and the anchor never leave the hub; what travels to a visit is one
[S, B, D] tensor: the core's hidden state to a visit that starts with core blocks, the proposal to a gate, the state to
coda or head. With further exits, h^(k) branches off the loop and goes through coda and head while the loop goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rgpt.pipeline.placement import HUB, Placement

PartKind = Literal["prelude", "anchor", "project", "core", "gate", "coda", "head"]


class Part(NamedTuple):
    """A piece of a visit's work, in the order of execution."""

    kind: PartKind
    step: int = 0
    """Recurrence k, from 1, of project, core and gate; the exit k that coda and head serve."""
    blocks: range = range(0)
    """Indices of the blocks in prelude, core or coda."""


@dataclass(frozen=True)
class Visit:
    """Work of one stage on one micro-batch, between the arrival of its input and the departure of its outputs."""

    stage: int
    parts: tuple[Part, ...]
    parent: int | None
    """Index of the visit whose output is this one's input; None at the root."""
    children: tuple[int, ...]
    """Visits whose input it puts out: one down the chain, and one per exit that branches off here."""


def visits(placement: Placement, depth: int, exits: Sequence[int] = ()) -> tuple[Visit, ...]:
    """The path of a micro-batch of this depth r ≥ 0: parents come before their children.

    h^(r) goes through coda and head as the last visits of the loop's own chain; each k < r of `exits` adds a branch
    (k > r is ignored).
    """
    path: list[tuple[int, list[Part], int | None]] = []

    def add(stage: int, parts: list[Part], parent: int | None) -> int:
        path.append((stage, parts, parent))
        return len(path) - 1

    def leave(hub_visit: int, step: int, own_parts: list[Part] | None) -> None:
        """Coda and head of h^(step); the hub's share goes into `own_parts`, or into a visit of its own."""
        parts = [] if own_parts is None else own_parts
        if placement.coda[HUB]:
            parts.append(Part("coda", step, placement.coda_blocks(HUB)))
        others = [stage for stage in range(1, placement.stages) if placement.coda[stage]]
        if not others:
            parts.append(Part("head", step))
        last = add(HUB, parts, hub_visit) if own_parts is None and parts else hub_visit
        for stage in others:
            last = add(stage, [Part("coda", step, placement.coda_blocks(stage))], last)
        if others:
            add(HUB, [Part("head", step)], last)

    here = [Part("prelude", 0, range(placement.prelude))]
    if depth > 0:
        here.append(Part("anchor"))
    last = hub_visit = add(HUB, here, None)
    for step in range(1, depth + 1):
        if step - 1 in exits:
            leave(hub_visit, step - 1, None)
        here.append(Part("project", step))
        if placement.core[HUB]:
            here.append(Part("core", step, placement.core_blocks(HUB)))
        last = hub_visit
        for stage in range(1, placement.stages):
            if placement.core[stage]:
                last = add(stage, [Part("core", step, placement.core_blocks(stage))], last)
        here = [Part("gate", step)]
        hub_visit = add(HUB, here, last)
    leave(hub_visit, depth, here)
    children: list[list[int]] = [[] for _ in path]
    for number, (_, _, parent) in enumerate(path):
        if parent is not None:
            children[parent].append(number)
    return tuple(
        Visit(stage, tuple(parts), parent, tuple(below))
        for (stage, parts, parent), below in zip(path, children, strict=True)
    )
