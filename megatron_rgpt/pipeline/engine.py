"""Runs a stage's program: the passes of its visits, and the transfers between stages in the plan's one global order.

One [S/tp, b, D] tensor travels per hop. Sends do not block; a receive is posted where the program has it or before, and
waited for where its tensor is used. What goes wrong names rank, stage, visit and micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.parallel.mesh import Mesh
from megatron_rgpt.pipeline.paths import Visit
from megatron_rgpt.pipeline.schedule import Operation, Plan, Planner
from megatron_rgpt.pipeline.segments import Passage, Segment, VisitRunner
from megatron_rgpt.pipeline.stage import StageModel

Key = tuple[int, int]
"""Micro-batch and visit."""

POSTED_AHEAD = 4
"""On gloo, where a tensor whose receive is posted comes at once, and another first asks for it: 2 % of a step against 6
with 4 stages of short passes. NCCL works off its transfers one after the other, so there a receive that overtakes a
send could wait for ever."""


class StageError(RuntimeError):
    """A visit failed; the message says whose."""


class StageRunner:
    """Executes steps on one rank of one stage. Gradients add up in the model's parameters."""

    def __init__(
        self,
        model: StageModel,
        mesh: Mesh,
        planner: Planner,
        *,
        recompute: bool,
        device: torch.device,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_backward` is called after each backward visit, when new gradients are in the parameters."""
        self._model, self._mesh, self._planner, self._device = model, mesh, planner, device
        self._visits = VisitRunner(model, recompute=recompute)
        self._after_backward = after_backward
        self._ranks = dist.get_process_group_ranks(mesh.pipeline.handle)
        self.posted_ahead = POSTED_AHEAD if dist.get_backend(mesh.pipeline.handle) == "gloo" else 0
        """Receives that may wait for their tensors before the program has them."""

    def train(self, batches: Sequence[MicroBatch], depths: Sequence[int]) -> torch.Tensor:
        """Forward and backward of one step; the mean loss over micro-batches on the hub, zero elsewhere."""
        plan = self._planner.plan(depths)
        step = _Step(self, plan, batches)
        step.run()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for passage, depth in zip(step.passages, depths, strict=True):
            if depth in passage.losses:
                total += passage.losses[depth] / len(depths)
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], exits: Sequence[int]) -> torch.Tensor:
        """Sum over micro-batches of the mean loss at each exit (rising order), on the hub; zeros elsewhere."""
        deepest = exits[-1]
        plan = self._planner.plan([deepest] * len(batches), forward_only=True, exits=tuple(exits))
        step = _Step(self, plan, batches)
        step.run()
        total = torch.zeros(len(exits), dtype=torch.float64, device=self._device)
        for passage in step.passages:
            for place, exit in enumerate(exits):
                if exit in passage.losses:
                    total[place] += passage.losses[exit]
        return total

    def send(self, tensor: torch.Tensor, stage: int) -> dist.Work:
        return dist.isend(tensor.contiguous(), self._ranks[stage], group=self._mesh.pipeline.handle)

    def receive(self, shape: Sequence[int], stage: int) -> tuple[torch.Tensor, dist.Work]:
        dtype = next(self._model.parameters()).dtype
        tensor = torch.empty(*shape, dtype=dtype, device=self._device)
        return tensor, dist.irecv(tensor, self._ranks[stage], group=self._mesh.pipeline.handle)


class _Step:
    """One step of one stage, from its first operation to its last."""

    def __init__(self, runner: StageRunner, plan: Plan, batches: Sequence[MicroBatch]) -> None:
        self._runner, self._plan, self._stage = runner, plan, runner._model.stage
        tp = runner._model.tp
        self.passages = [Passage(batch.on_shard(tp.rank, tp.size)) for batch in batches]
        self._segments: dict[Key, list[Segment]] = {}
        self._inputs: dict[Key, torch.Tensor] = {}
        """Leaves that visits of this stage start from."""
        self._outputs: dict[Key, torch.Tensor] = {}
        """Leaves that visits, here or elsewhere, will start from, by the reading visit."""
        self._arriving: dict[tuple[str, Key], tuple[torch.Tensor, dist.Work]] = {}
        self._leaving: list[tuple[Operation, torch.Tensor, dist.Work]] = []
        config, tokens_BS = runner._model.config, batches[0].tokens_BS
        self._shape = (tokens_BS.shape[1] // tp.size, tokens_BS.shape[0], config.hidden_size)

    def run(self) -> None:
        program = self._plan.program(self._stage)
        receives = deque(operation for operation in program if operation.kind == "receive")
        for operation in program:
            if operation.kind != "receive":
                with self._named(operation):
                    self._execute(operation)
            while receives and (receives[0] is operation or len(self._arriving) < self._runner.posted_ahead):
                early = receives.popleft()
                with self._named(early):
                    self._execute(early)
        for operation, _, work in self._leaving:
            with self._named(operation):
                work.wait()

    @contextmanager
    def _named(self, operation: Operation) -> Iterator[None]:
        """Say of what goes wrong whose it is."""
        try:
            yield
        except Exception as error:
            raise StageError(
                f"rank {dist.get_rank()}, pipeline stage {self._stage}: {operation.kind} of visit "
                f"{operation.visit} of micro-batch {operation.micro_batch}: {error}"
            ) from error

    def _execute(self, operation: Operation) -> None:
        key = (operation.micro_batch, operation.visit)
        if operation.kind == "forward":
            self._forward(key)
        elif operation.kind == "backward":
            self._backward(key)
        elif operation.kind == "receive":
            self._arriving[operation.payload, key] = self._runner.receive(self._shape, operation.peer)
        else:
            tensor = self._inputs.pop(key).grad if operation.payload == "gradient" else self._outputs[key]
            self._leaving = [entry for entry in self._leaving if not entry[-1].is_completed()]
            self._leaving.append((operation, tensor, self._runner.send(tensor.detach(), operation.peer)))
            if self._plan.forward_only:
                del self._outputs[key]

    def _forward(self, key: Key) -> None:
        micro_batch, number = key
        path = self._plan.paths[micro_batch]
        visit, passage = path[number], self.passages[micro_batch]
        leaf = None
        if visit.parent is not None:
            if path[visit.parent].stage == self._stage:
                leaf = self._outputs.pop(key)
            else:
                tensor, work = self._arriving.pop(("activation", key))
                work.wait()
                leaf = tensor.requires_grad_(torch.is_grad_enabled())
                self._inputs[key] = leaf
        scale = 1.0 / len(self.passages)
        flowing, segments = self._runner._visits.forward(visit.parts, passage, leaf, scale)
        if not self._plan.forward_only:
            self._segments[key] = segments
        for child, below in enumerate(path):
            if below.parent == number:
                self._outputs[micro_batch, child] = passage.state_sBD if _exits(visit, below) else flowing

    def _backward(self, key: Key) -> None:
        micro_batch, number = key
        path = self._plan.paths[micro_batch]
        for child, below in enumerate(path):
            if below.parent == number and below.stage != self._stage:
                tensor, work = self._arriving.pop(("gradient", (micro_batch, child)))
                work.wait()
                self._outputs.pop((micro_batch, child)).grad = tensor
        for segment in reversed(self._segments.pop(key)):
            segment.backward()
        if path[number].parent is None:
            # the micro-batch has come back to where it began
            self.passages[micro_batch].state_sBD, self.passages[micro_batch].anchor = None, ()
        self._runner._after_backward()


def _exits(visit: Visit, child: Visit) -> bool:
    """Whether the child reads the state that leaves the loop here, and not what goes on in it."""
    return child.parts[0].kind in ("coda", "head") and any(part.kind == "project" for part in visit.parts)
