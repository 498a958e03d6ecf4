"""The update rule of a looped core: what happens around the core at each recurrence.

A rule is the only thing that differs between recurrent-depth models of one layout. The model drives it:

    state, anchor = rule.start(h_pre)
    for k in 1..r:
        state = rule.update(state, core(rule.project(state, anchor, context)), anchor, context)

Each call must leave its products to submodules' `forward` (ZeRO-3 gathers a module's weights around its forward), and
must draw random numbers from `context.noise` alone, so that recomputation replays them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_rgpt.randomness import Noise


@dataclass(frozen=True)
class StepContext:
    """What a rule may know of recurrence `step` (from 1)."""

    step: int
    noise: Noise | None
    """None where noise is off (evaluation)."""
    gate_override: float | None = None
    """A constant in the gate's place: 1 copies the state, 0 writes the proposal."""


class UpdateRule(nn.Module):
    """State, anchor and update of a looped core.

    States are [s, B, D], a rank's shard of the sequence; an anchor is a tuple of such.
    """

    @abstractmethod
    def start(self, h_pre_sBD: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The state h^(0) and what stays fixed over the loop."""

    @abstractmethod
    def project(self, state_sBD: torch.Tensor, anchor: tuple[torch.Tensor, ...], context: StepContext) -> torch.Tensor:
        """The core's input."""

    @abstractmethod
    def update(
        self,
        state_sBD: torch.Tensor,
        proposal_sBD: torch.Tensor,
        anchor: tuple[torch.Tensor, ...],
        context: StepContext,
    ) -> torch.Tensor:
        """The next state from the core's proposal."""

    def core_arguments(self, context: StepContext) -> dict[str, Any]:
        """What each core block gets at this step besides its input."""
        return {}

    def extra_loss(self) -> torch.Tensor | None:
        """A loss of the rule's own from the last loop, added to cross entropy; not asked for in a pipeline."""
        return None
