"""The DeepSpeed engine of a run, and what DeepSpeed leaves to us: tensor-parallel sums; norm and clipping at stage 0.

DeepSpeed reduces gradients over data-parallel ranks. The gradients of parameters that tensor-parallel ranks replicate
are partial sums (each saw its shard of the sequence), and they are added up before DeepSpeed uses them: under ZeRO 0
and 1 once an iteration, on the accumulated gradients; under ZeRO 2 and 3, which reduce and partition inside each
backward pass, by a hook on each gradient that runs before theirs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import deepspeed
import pydantic
import torch
import torch.distributed as dist
from torch import nn

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import Group, Mesh
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.pipeline.configure import PipelinePlan
from megatron_rgpt.pipeline.engine import StageRunner
from megatron_rgpt.pipeline.schedule import Planner
from megatron_rgpt.pipeline.stage import StageModel, build_stage
from megatron_rgpt.training.deepspeed_config import deepspeed_config


class Engine:
    """Trains a model without pipeline stages: AdamW, ZeRO, mixed precision, clipping. Process groups must exist.

    An iteration is one `accumulate` of all its micro-batches and one `step`.
    """

    def __init__(self, model: nn.Module, registry: Registry, config: Config, batch: BatchPlan, mesh: Mesh) -> None:
        if config.training.precision == "fp64":
            model.double()
        optimizer = torch.optim.AdamW(
            registry.optimizer_groups(config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
            eps=config.optimizer.adam_eps,
            # the fused kernel computes with fp32 constants
            fused=config.training.precision != "fp64",
        )
        self.registry, self.mesh, self.stage = registry, mesh, config.parallel.zero_stage
        settings = deepspeed_config(config, batch)
        if self.stage == 0:
            # DeepSpeed's own clipping there counts a pipeline's first stage alone
            self._clip, settings["gradient_clipping"] = config.optimizer.clip_grad, 0.0
        try:
            with _quiet_deepspeed():
                self.deepspeed, *_ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=settings, mpu=mesh.mpu()
                )
        except pydantic.ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UserError(f"--deepspeed_config {config.parallel.deepspeed_config}: {wrong}") from None
        self.device = self.deepspeed.device
        self._replicated = [entry for entry in registry if not entry.sharded] if mesh.tensor.size > 1 else []
        if self.stage >= 2:
            for entry in self._replicated:
                entry.parameter.register_hook(lambda grad: _sum(grad.contiguous(), mesh.tensor))

    def accumulate(self, batches: Sequence[MicroBatch], depths: Sequence[int]) -> torch.Tensor:
        """Forward and backward of the micro-batches at their depths; this rank's mean loss, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (batch, depth) in enumerate(zip(batches, depths, strict=True), start=1):
            # under ZeRO 0 and 1 nothing is reduced before `step`
            self.deepspeed.set_gradient_accumulation_boundary(number == len(batches) and self.stage >= 2)
            loss = self.deepspeed(**batch._asdict(), depth=depth)
            total += loss.detach() / len(batches)
            self.deepspeed.backward(loss)
        return total

    @torch.no_grad()
    def exit_losses(self, batches: Sequence[MicroBatch], exits: Sequence[int]) -> torch.Tensor:
        """Sum over micro-batches of the mean loss at each exit, fp64; in evaluation mode."""
        total = torch.zeros(len(exits), dtype=torch.float64, device=self.device)
        self.deepspeed.eval()
        for batch in batches:
            total += self.deepspeed(**batch._asdict(), exits=exits)
        self.deepspeed.train()
        return total

    def step(self, rate: float) -> float:
        """Update the weights at this learning rate; returns the norm of the gradient before clipping."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if self.stage < 2:
            self._fill_gradients()
            self._sum_replicated()
            self.deepspeed.set_gradient_accumulation_boundary(True)
            self.deepspeed.allreduce_gradients()
        if self.stage == 0:
            norm = self._norm()
            if self._clip and norm > self._clip:
                for entry in self.registry:
                    entry.parameter.grad.mul_(self._clip / norm)
        self.deepspeed.step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
            # DeepSpeed says -1 where some norms are not finite
            norm = norm if norm >= 0 else math.nan
        return norm

    def _fill_gradients(self) -> None:
        """Zeros for parameters that nothing reached."""

    def _sum_replicated(self) -> None:
        """Add up replicated parameters' accumulated gradients over tensor-parallel ranks, in one message."""
        if not self._replicated:
            return
        gradients = self._accumulated()
        parts = [gradients[entry.parameter] for entry in self._replicated]
        flat = _sum(torch.cat([part.flatten() for part in parts]), self.mesh.tensor)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))

    def _accumulated(self) -> dict[torch.Tensor, torch.Tensor]:
        """Where DeepSpeed keeps each parameter's gradient before it reduces it, under ZeRO 0 and 1."""
        optimizer = self.deepspeed.optimizer
        if hasattr(optimizer, "fp32_groups_gradients"):
            # bf16 under ZeRO-1 accumulates in fp32
            groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            return {p: gradient for ps, gradients in groups for p, gradient in zip(ps, gradients, strict=True)}
        if self.stage == 1:
            return {entry.parameter: optimizer.get_gradient_for_reduction(entry.parameter) for entry in self.registry}
        return {entry.parameter: entry.parameter.grad for entry in self.registry}

    def _norm(self) -> float:
        """Norm of the reduced gradient from the registry: each parameter once, whoever holds it."""
        mine = [
            entry.parameter.grad.double().square().sum()
            for entry in self.registry
            if entry.sharded or self.mesh.tensor.rank == 0
        ]
        total = torch.stack(mine).sum() if mine else torch.zeros((), dtype=torch.float64, device=self.device)
        if self.mesh.model.size > 1:
            dist.all_reduce(total, group=self.mesh.model.handle)
        return total.sqrt().item()


class PipelineEngine(Engine):
    """Trains one stage of a looped pipeline; DeepSpeed sees a plain model whose gradients come by themselves."""

    def __init__(
        self,
        model: StageModel,
        registry: Registry,
        config: Config,
        batch: BatchPlan,
        mesh: Mesh,
        planner: Planner,
    ) -> None:
        super().__init__(model, registry, config, batch, mesh)
        self._runner = StageRunner(
            model,
            mesh,
            planner,
            recompute=config.training.recompute == "step",
            device=self.device,
            after_backward=self._collect if config.training.precision == "bf16" else lambda: None,
        )

    def accumulate(self, batches: Sequence[MicroBatch], depths: Sequence[int]) -> torch.Tensor:
        self.deepspeed.set_gradient_accumulation_boundary(False)
        return self._runner.train(batches, depths)

    def exit_losses(self, batches: Sequence[MicroBatch], exits: Sequence[int]) -> torch.Tensor:
        """As for `Engine`; every stage gets the hub's losses."""
        total = self._runner.evaluate(batches, exits)
        dist.all_reduce(total, group=self.mesh.pipeline.handle)
        return total

    def _collect(self) -> None:
        """Move bf16 gradients to DeepSpeed's fp32 ones, which add up."""
        self.deepspeed.optimizer.update_hp_grads(clear_lp_grads=True)

    def _fill_gradients(self) -> None:
        # a step in which every depth is 0 reaches no core, and all ranks still reduce it
        for entry in self.registry:
            if entry.parameter.grad is None:
                entry.parameter.grad = torch.zeros_like(entry.parameter)
        if hasattr(self.deepspeed.optimizer, "update_hp_grads"):
            self._collect()


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    dist.all_reduce(tensor, group=group.handle)
    return tensor


def build_engine(
    config: Config,
    batch: BatchPlan,
    mesh: Mesh,
    pipeline: PipelinePlan | None,
    load: Callable[[Registry], None] = lambda registry: None,
) -> Engine:
    """This rank's engine with initial weights, which `load` may replace: one stage, or the model as a whole."""
    vocab_size, seed = config.data.vocab_size, config.training.seed
    if pipeline is None:
        recompute = config.training.recompute == "step"
        model, registry = build_model(config.model, vocab_size, seed, recompute=recompute, tp=mesh.tensor)
        load(registry)
        return Engine(model, registry, config, batch, mesh)
    stage = mesh.pipeline.rank
    model, registry = build_stage(config.model, vocab_size, seed, pipeline.placement, stage, mesh.tensor)
    load(registry)
    planner = Planner(pipeline.placement, pipeline.costs, pipeline.limits, effort=pipeline.effort)
    return PipelineEngine(model, registry, config, batch, mesh, planner)


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Keep DeepSpeed's start-up reports, printed by every rank, out of the log."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it calls collectives by names that newer torch deprecates, as we do for older torch
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    with contextlib.redirect_stdout(io.StringIO()):
        yield
