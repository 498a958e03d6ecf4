"""The work of one visit as graph segments between detached leaves.

No autograd graph crosses a visit. A segment's outputs are detached into leaves; what reads an output reads its leaf,
and so the leaf's gradient adds up over all readers: h^(k) collects from the carry, the gate and the projection of the
next visit, the anchor from every recurrence. A segment runs backward once, when all its readers have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

from megatron_rgpt.model.head import mean_loss
from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.model.recurrence import StepContext
from megatron_rgpt.pipeline.paths import Part
from megatron_rgpt.pipeline.stage import StageModel


@dataclass
class Segment:
    """Outputs with their graph, and the leaves that stand for them outside."""

    outputs: tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...]

    def backward(self) -> None:
        """Send the leaves' gradients through the graph, and let go of it."""
        read = [(out, leaf.grad) for out, leaf in zip(self.outputs, self.leaves, strict=True) if leaf.grad is not None]
        if read:
            outputs, gradients = zip(*read, strict=True)
            torch.autograd.backward(outputs, gradients)


@dataclass
class Passage:
    """What one micro-batch leaves on one stage: on the hub its state and anchor; everywhere its open segments."""

    batch: MicroBatch | None
    """None on stages other than the hub, which need no tokens."""
    state_sBD: torch.Tensor | None = None
    anchor: tuple[torch.Tensor, ...] = ()
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """By exit k, the mean loss, without gradient."""


class VisitRunner:
    """Runs the parts of visits on one stage's model."""

    def __init__(self, model: StageModel, *, recompute: bool) -> None:
        self._model, self._recompute = model, recompute

    def forward(
        self, parts: Sequence[Part], passage: Passage, input_sBD: torch.Tensor | None, loss_scale: float
    ) -> tuple[torch.Tensor | None, list[Segment]]:
        """Run the parts in order on a leaf `input_sBD` (None: the micro-batch's tokens).

        Returns the leaf of what travels on (None where the path ends here) and the segments to run backward. The loss
        of the micro-batch counts `loss_scale` times.
        """
        segments: list[Segment] = []
        flowing = input_sBD

        def run(function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *arguments) -> tuple:
            if self._recompute and torch.is_grad_enabled():
                outputs = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                outputs = function(*arguments)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            leaves = tuple(out.detach().requires_grad_(out.requires_grad) for out in outputs)
            segments.append(Segment(outputs, leaves))
            return leaves

        for group in _in_segments(parts):
            kind, step = group[0].kind, group[0].step
            if kind == "prelude":
                starts_loop = any(part.kind == "anchor" for part in group)
                state, *anchor = run(self._start, passage.batch, group[0].blocks, starts_loop)
                passage.state_sBD, passage.anchor = state, tuple(anchor)
                flowing = state
            elif kind == "gate":
                context = StepContext(step, passage.batch.noise)
                (flowing,) = run(self._update, passage.state_sBD, flowing, passage.anchor, context)
                passage.state_sBD = flowing
            elif kind == "project":
                context = StepContext(step, passage.batch.noise)
                cores = [part.blocks for part in group[1:]]
                (flowing,) = run(self._propose, passage.state_sBD, passage.anchor, context, cores)
            elif group[-1].kind == "head":
                codas = [part.blocks for part in group[:-1]]
                (loss,) = run(self._leave, flowing, codas, passage.batch)
                passage.losses[group[-1].step] = loss.detach()
                if loss.requires_grad:
                    loss.grad = torch.full_like(loss, loss_scale)
                flowing = None
            else:
                blocks = getattr(self._model, kind)
                (flowing,) = run(_through, [blocks[str(i)] for part in group for i in part.blocks], flowing)
        return flowing, segments

    def _start(self, batch: MicroBatch, prelude: range, starts_loop: bool) -> tuple[torch.Tensor, ...]:
        model = self._model
        h_sBD = _through([model.prelude[str(i)] for i in prelude], model.embedding(batch.tokens_BS, batch.positions_BS))
        if not starts_loop:
            return (h_sBD,)
        state_sBD, anchor = model.rule.start(h_sBD)
        return (state_sBD, *anchor)

    def _propose(
        self, state_sBD: torch.Tensor, anchor: tuple[torch.Tensor, ...], context: StepContext, cores: list[range]
    ) -> torch.Tensor:
        x_sBD = self._model.rule.project(state_sBD, anchor, context)
        return _through([self._model.core[str(i)] for blocks in cores for i in blocks], x_sBD)

    def _update(
        self,
        state_sBD: torch.Tensor,
        proposal_sBD: torch.Tensor,
        anchor: tuple[torch.Tensor, ...],
        context: StepContext,
    ) -> torch.Tensor:
        return self._model.rule.update(state_sBD, proposal_sBD, anchor, context)

    def _leave(self, state_sBD: torch.Tensor, codas: list[range], batch: MicroBatch) -> torch.Tensor:
        state_sBD = _through([self._model.coda[str(i)] for blocks in codas for i in blocks], state_sBD)
        return mean_loss(self._model.head(state_sBD, batch.labels_BS), batch.weights_BS)


def _in_segments(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts grouped into segments: a new one begins where an output is read by more than the next part."""
    joins = {"anchor": {"prelude"}, "core": {"project", "core"}, "coda": {"coda"}, "head": {"coda"}}
    groups: list[list[Part]] = []
    for part in parts:
        if groups and groups[-1][0].kind in joins.get(part.kind, ()):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _through(blocks: Sequence[torch.nn.Module], x_sBD: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x_sBD = block(x_sBD)
    return x_sBD
