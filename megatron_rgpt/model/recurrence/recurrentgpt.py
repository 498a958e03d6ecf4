"""The update rule of RecurrentGPT (paper §3.3), with the switches of its ablation ladder.

    input     W_proj [h + eps_x, h_pre]          Eq. 2; without the anchor: h + eps_x
    proposal  o = core(input)                    Eq. 3
    state     g * h + (1 - g) * o                Eq. 4-5; without the gate: o

h^(0) is h_pre, so that a gate forced to 1 leaves the prelude's output to the coda. Noise enters the core's input at
every step, and the gate's logit; the carry, the gate and its LayerNorms see the clean state.
"""

from __future__ import annotations

import torch

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.model.modulation import Gate, Projection
from megatron_rgpt.model.recurrence.interface import StepContext, UpdateRule

STATE_NOISE, GATE_NOISE = "state_noise", "gate_noise"


class RecurrentGPT(UpdateRule):
    """Projection of the anchor, and gate. The anchor is (h_pre, projected half, gate's half); hoisted if asked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.projection = Projection(config) if config.anchor else None
        self.gate = Gate(config) if config.gate else None

    def start(self, h_pre_sBD: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        hoisted = self._anchor_terms(h_pre_sBD) if self.config.hoist_anchor else ()
        return h_pre_sBD, (h_pre_sBD, *hoisted)

    def project(self, state_sBD: torch.Tensor, anchor: tuple[torch.Tensor, ...], context: StepContext) -> torch.Tensor:
        if context.noise is not None and self.config.state_noise_std > 0:
            noise_sBD = context.noise.draw_sBD(STATE_NOISE, context.step, state_sBD)
            state_sBD = torch.add(state_sBD, noise_sBD, alpha=self.config.state_noise_std)
        if self.projection is None:
            return state_sBD
        term_sBD = anchor[1] if self.config.hoist_anchor else self.projection.anchor(anchor[0])
        return self.projection(state_sBD, term_sBD)

    def update(
        self,
        state_sBD: torch.Tensor,
        proposal_sBD: torch.Tensor,
        anchor: tuple[torch.Tensor, ...],
        context: StepContext,
    ) -> torch.Tensor:
        if self.gate is None:
            return proposal_sBD
        if context.gate_override is not None:
            write_sBD = torch.full_like(state_sBD, 1.0 - context.gate_override)
        else:
            noise_sBD = None
            if context.noise is not None and self.config.gate_noise_std > 0:
                noise_sBD = context.noise.draw_sBD(GATE_NOISE, context.step, state_sBD) * self.config.gate_noise_std
            term_sBD = anchor[-1] if self.config.hoist_anchor else self.gate.anchor_term(anchor[0])
            write_sBD = self.gate(state_sBD, term_sBD, noise_sBD)
        # g * h + (1 - g) * o = h + (1 - g) * (o - h) in one pass, exact at g = 0 and g = 1
        return torch.lerp(state_sBD, proposal_sBD, write_sBD)

    def _anchor_terms(self, h_pre_sBD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        terms = () if self.projection is None else (self.projection.anchor(h_pre_sBD),)
        return terms if self.gate is None else (*terms, self.gate.anchor_term(h_pre_sBD))
