"""Which blocks lie on which stage. Pure: no torch, no process group.

Stage 0 is the hub: embedding, prelude, modulation, final norm and tied head. Core and coda blocks may lie on any stage,
in the order of the stages, and each on one alone, so no weight exists twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.counts import count_parameters

HUB = 0
_TEXT = re.compile(r"core=(\d+(?:,\d+)*) coda=(\d+(?:,\d+)*)")


@dataclass(frozen=True)
class Placement:
    """Blocks per stage: `core[s]` and `coda[s]` of stage s; the `prelude` blocks are the hub's."""

    core: tuple[int, ...]
    coda: tuple[int, ...]
    prelude: int

    def __post_init__(self) -> None:
        assert len(self.core) == len(self.coda) >= 1 and sum(self.core) > 0, self

    @property
    def stages(self) -> int:
        return len(self.core)

    def core_blocks(self, stage: int) -> range:
        """Indices in the core of the blocks that the stage holds."""
        first = sum(self.core[:stage])
        return range(first, first + self.core[stage])

    def coda_blocks(self, stage: int) -> range:
        """Indices in the coda of the blocks that the stage holds."""
        first = sum(self.coda[:stage])
        return range(first, first + self.coda[stage])

    def parameters(self, config: ModelConfig, vocab_size: int) -> tuple[int, ...]:
        """Stored parameters of each stage; they add up to the model's."""
        counts = count_parameters(config, vocab_size)
        block = counts.blocks // config.layout.unique_blocks
        shares = [block * (core + coda) for core, coda in zip(self.core, self.coda, strict=True)]
        shares[HUB] += counts.total - counts.blocks + block * self.prelude
        return tuple(shares)

    def __str__(self) -> str:
        """The text that `parse_placement` reads."""
        return f"core={','.join(map(str, self.core))} coda={','.join(map(str, self.coda))}"


def parse_placement(text: str, layout: Layout, stages: int) -> Placement:
    """Read `core=3,5,6,6 coda=2,0,0,0`. Raises `UserError` where it does not add up to the layout and the stages."""
    check_stages(layout, stages)
    match = _TEXT.fullmatch(" ".join(text.split()))
    if match is None:
        raise UserError(
            f"--pipeline-placement {text!r} does not parse: expected a form such as core=3,5,6,6 coda=2,0,0,0"
        )
    placed = {
        name: tuple(map(int, numbers.split(",")))
        for name, numbers in zip(("core", "coda"), match.groups(), strict=True)
    }
    for name, shares in placed.items():
        blocks = getattr(layout, name)
        if len(shares) != stages:
            raise UserError(
                f"--pipeline-placement {text!r}: {name} names {len(shares)} stages, "
                f"--pipeline-model-parallel-size is {stages}: give one number per stage"
            )
        if sum(shares) != blocks:
            raise UserError(
                f"--pipeline-placement {text!r}: {name} places {sum(shares)} blocks, --layout {layout} has {blocks}"
            )
    placement = Placement(placed["core"], placed["coda"], layout.prelude)
    for stage in range(1, stages):
        if placement.core[stage] == placement.coda[stage] == 0:
            raise UserError(
                f"--pipeline-placement {text!r}: stage {stage} holds no block: give it one, "
                f"or use --pipeline-model-parallel-size {stages - 1}"
            )
    return placement


def check_stages(layout: Layout, stages: int) -> None:
    """Raise `UserError` where the layout's blocks cannot fill the stages: each but the hub holds at least one."""
    if layout.is_dense:
        raise UserError(
            f"--pipeline-model-parallel-size {stages} with --layout {layout}: a dense model has no core to spread; "
            "use data or tensor parallelism"
        )
    movable = layout.core + layout.coda
    if stages > movable + 1:
        raise UserError(
            f"--pipeline-model-parallel-size {stages} is more than --layout {layout} can fill: it has {movable} blocks "
            f"of core and coda to place beside the hub, so use at most {movable + 1}"
        )
