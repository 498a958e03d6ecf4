"""What each piece of a micro-batch's path costs, in time and in held activations, from the model's FLOPs.

Costs are whole numbers, so that every stage computes the same plan. The FLOPs are those of `model.counts`, taken apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.counts import executed_flops_per_token, paper_flops_per_token
from megatron_rgpt.pipeline.paths import Visit

BACKWARD_FORWARDS = 2
"""A backward pass computes the gradient of each product's input and of its weight: two products for one."""


@dataclass(frozen=True)
class Cost:
    """Time of the forward and of the backward pass, and what is held between the two, for one micro-batch."""

    forward: int
    backward: int
    held: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward, self.held + other.held)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.forward * times, self.backward * times, self.held * times)


@dataclass(frozen=True)
class Costs:
    """Costs of a micro-batch by part of a visit. Time in one unit throughout (FLOPs, or measured), `held` in bytes."""

    block: Cost
    anchor: Cost
    project: Cost
    gate: Cost
    head: Cost
    boundary: int
    """Bytes of a visit's input, held from its forward to its backward pass."""
    hop: int = 0
    """Time from the end of a visit until its output is at another stage."""

    def of(self, visit: Visit) -> Cost:
        """Cost of one visit."""
        total = Cost(0, 0, self.boundary)
        for part in visit.parts:
            if part.kind in ("prelude", "core", "coda"):
                total += self.block * len(part.blocks)
            else:
                total += getattr(self, part.kind)
        return total


def flops_costs(
    config: ModelConfig,
    vocab_size: int,
    *,
    micro_batch_size: int = 1,
    recompute: bool = False,
    element_bytes: int = 2,
) -> Costs:
    """Costs in FLOPs and bytes of a micro-batch of [S, b, d] activations.

    Backward = 2 forwards; with recomputation one more, except in the head, and of a visit only its input is held.
    Otherwise a block holds 16 tensors [S, b, d]: inputs of both LayerNorms, their outputs, Q, K, V, the attention's
    output, and 4 + 4 of the MLP (Korthikanti et al. 2022, eq. 2, without dropout and without the S x S scores).
    Gate and projection hold what their products and the blend read; the head its input and fp32 logits.
    """
    tokens = config.seq_length * micro_batch_size
    tensor = tokens * config.hidden_size * element_bytes
    block = paper_flops_per_token(replace(config, layout=Layout(1)), 0)

    def loop_flops(part: ModelConfig) -> tuple[int, int]:
        """Modulation of one recurrence, and of the anchor once."""
        zero, one, two = (executed_flops_per_token(part, vocab_size, depth) for depth in range(3))
        core = config.layout.core * block
        return two - one - core, (one - zero - core) - (two - one - core)

    project, project_anchor = loop_flops(replace(config, gate=False))
    gate, gate_anchor = loop_flops(replace(config, anchor=False))
    outside = config.layout.block_executions(0) * block
    head = executed_flops_per_token(config, vocab_size, 0) - outside

    def cost(flops_per_token: int, tensors_held: int) -> Cost:
        forward = flops_per_token * tokens
        forwards = BACKWARD_FORWARDS + recompute
        return Cost(forward, forwards * forward, 0 if recompute else tensors_held * tensor)

    return Costs(
        block=cost(block, 16),
        anchor=replace(cost(project_anchor + gate_anchor, 0), held=3 * tensor),
        project=cost(project, 1),
        gate=replace(cost(gate, 6), held=(1 if recompute else 6) * tensor),
        head=Cost(head * tokens, BACKWARD_FORWARDS * head * tokens, 2 * tensor + 4 * vocab_size * tokens),
        boundary=tensor,
    )
