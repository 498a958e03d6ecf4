"""The DeepSpeed engine of a run, and what DeepSpeed leaves to us: tensor-parallel sums, and the norm at stage 0.

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
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.model.recurrent import RecurrentTransformer
from megatron_rgpt.parallel.mesh import Group, Mesh
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.training.deepspeed_config import deepspeed_config


class Engine:
    """Trains one rank's part of a model: AdamW, ZeRO, mixed precision, clipping. Process groups must exist.

    An iteration is one `backward` per micro-step and one `step`. Evaluation calls the model as a function.
    """

    def __init__(
        self, model: RecurrentTransformer, registry: Registry, config: Config, batch: BatchPlan, mesh: Mesh
    ) -> None:
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
        with _quiet_deepspeed():
            self.deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config(config, batch), mpu=mesh.mpu()
            )
        self.registry, self.mesh = registry, mesh
        self.stage, self.device = config.parallel.zero_stage, self.deepspeed.device
        self._replicated = [entry for entry in registry if not entry.sharded] if mesh.tensor.size > 1 else []
        if self.stage >= 2:
            for entry in self._replicated:
                entry.parameter.register_hook(lambda grad: _sum(grad.contiguous(), mesh.tensor))

    def __call__(self, *arguments, **keywords) -> torch.Tensor:
        return self.deepspeed(*arguments, **keywords)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients."""
        self.deepspeed.eval()
        with torch.no_grad():
            yield
        self.deepspeed.train()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate the gradients of one micro-step's mean loss; `last` is the iteration's last."""
        # under ZeRO 0 and 1 nothing is reduced before `step`
        self.deepspeed.set_gradient_accumulation_boundary(last and self.stage >= 2)
        self.deepspeed.backward(loss)

    def step(self, rate: float) -> float:
        """Update the weights at this learning rate; returns the norm of the gradient before clipping."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if self.stage < 2:
            self._sum_replicated()
            self.deepspeed.set_gradient_accumulation_boundary(True)
            self.deepspeed.allreduce_gradients()
        if self.stage == 0:
            norm = self._norm()
        self.deepspeed.step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
            # DeepSpeed says -1 where some norms are not finite
            norm = norm if norm >= 0 else math.nan
        return norm

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


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    dist.all_reduce(tensor, group=group.handle)
    return tensor


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Keep DeepSpeed's start-up reports, printed by every rank, out of the log."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it calls collectives by names that newer torch deprecates, as we do for older torch
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    with contextlib.redirect_stdout(io.StringIO()):
        yield
