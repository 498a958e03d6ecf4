"""The DeepSpeed engine of a run, and what DeepSpeed does not tell at every ZeRO stage: the gradient norm."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.model.recurrent import RecurrentTransformer
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.training.deepspeed_config import deepspeed_config


def build_engine(model: RecurrentTransformer, registry: Registry, config: Config, batch: BatchPlan) -> DeepSpeedEngine:
    """Wrap the model for training: AdamW, ZeRO, mixed precision, clipping. Process groups must exist."""
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
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config, batch))
    return engine


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Keep DeepSpeed's start-up reports, printed by every rank, out of the log."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that newer torch deprecates, once per call
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def set_learning_rate(engine: DeepSpeedEngine, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def apply_gradients(engine: DeepSpeedEngine, registry: Registry, *, boundary: bool) -> float | None:
    """DeepSpeed's step after a backward; at the boundary of an iteration the norm of its gradient before clipping."""
    norm = None
    if boundary and not engine.zero_optimization():
        # plain fp32: gradients are whole and reduced at this point, and DeepSpeed clips without a report
        norms = [entry.parameter.grad.norm() for entry in registry if entry.parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    engine.step()
    if boundary and norm is None:
        norm = float(engine.get_global_grad_norm())
    return norm
