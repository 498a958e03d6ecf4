"""What a run of a few steps computes, in any layout and in one plain process, for comparison.

`engine_trace` trains through DeepSpeed on ranks, as the main job does. `reference_trace` knows neither DeepSpeed nor
ranks: torch's autograd over whole depth groups, AdamW and clipping written out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from megatron_rgpt.checkpoint.tensors import EngineTensors
from megatron_rgpt.config import Config, plan_batch
from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import Mesh, MeshShape
from megatron_rgpt.parallel.registry import Entry, Registry
from megatron_rgpt.pipeline.configure import configure_pipeline
from megatron_rgpt.randomness import Noise, step_depths
from megatron_rgpt.training.depth import micro_step_depths
from megatron_rgpt.training.engine import build_engine
from megatron_rgpt.training.feed import micro_batches
from megatron_rgpt.training.learning_rate import learning_rate

STEPS = 5


@dataclass(frozen=True)
class Trace:
    """What `STEPS` steps computed; tensors by canonical name, in logical shapes."""

    losses: list[float]
    norms: list[float]
    autograd: dict[str, torch.Tensor]
    """The first step's gradient, as the model makes it."""
    gradient: dict[str, torch.Tensor]
    """The same as it reached the optimizer: reduced by DeepSpeed, clipped, rounded to its fp32 master gradients."""
    weights: dict[str, torch.Tensor]


def sample(config: Config, ordinal: int) -> torch.Tensor:
    """Made-up tokens [S + 1] of a sample, by its ordinal alone."""
    generator = torch.Generator().manual_seed(1000 + ordinal)
    return torch.randint(config.data.vocab_size, (config.model.seq_length + 1,), generator=generator)


def engine_trace(config: Config) -> Trace:
    """Train `STEPS` iterations on the ranks of the default process group. Collective."""
    parallel = config.parallel
    shape = MeshShape.of(
        dist.get_world_size(),
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
    )
    mesh, batch = Mesh.build(shape), plan_batch(config, shape.data)
    engine = build_engine(config, batch, mesh, configure_pipeline(config, batch))
    tensors, registry = EngineTensors(engine.deepspeed), engine.registry

    def samples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(mesh.data.rank * batch.micro_batch_size, STEPS * batch.global_batch_size, batch.chunk):
            ordinals = torch.arange(first, first + batch.micro_batch_size)
            yield ordinals.numpy(), torch.stack([sample(config, int(o)) for o in ordinals]).numpy()

    feed = micro_batches(samples(), config.training.seed, engine.device)
    autograd = _watch_gradients(registry)
    losses, norms, gradient = [], [], {}
    for iteration in range(1, STEPS + 1):
        depths = micro_step_depths(config, batch, (iteration - 1) * batch.global_batch_size)
        loss = engine.accumulate(list(islice(feed, batch.micro_steps)), depths)
        norms.append(engine.step(learning_rate(config.optimizer, iteration, STEPS)))
        for group in (mesh.data, mesh.pipeline):
            dist.all_reduce(loss, group=group.handle)
        losses.append(loss.item() / mesh.data.size)
        if iteration == 1:
            autograd = {name: _over_ranks(registry[name], grad, mesh, config) for name, grad in autograd.items()}
            # the first moment after one step is the clipped gradient that reached the optimizer, times 1 - beta1
            scale = 1 - config.optimizer.adam_beta1
            gradient = {entry.name: tensors.read(entry, "exp_avg").clone() / scale for entry in registry}
    weights = {entry.name: tensors.read(entry, "weight").clone() for entry in registry}
    return Trace(losses, norms, *(_over_stages(part, mesh) for part in (autograd, gradient, weights)))


def _over_stages(part: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """All stages' tensors. No parameter is on two of them."""
    stages: list[dict[str, torch.Tensor]] = [{}] * mesh.pipeline.size
    dist.all_gather_object(stages, part, group=mesh.pipeline.handle)
    merged = {name: tensor for stage in stages for name, tensor in stage.items()}
    assert len(merged) == sum(len(stage) for stage in stages)
    return merged


def _watch_gradients(registry: Registry) -> dict[str, torch.Tensor]:
    """This rank's gradients as autograd makes them, fp64, adding up over backward passes."""
    gradients = {entry.name: torch.zeros(entry.held, dtype=torch.float64) for entry in registry}
    for entry in registry:

        def add(grad: torch.Tensor, total: torch.Tensor = gradients[entry.name]) -> None:
            total.add_(grad)

        entry.parameter.register_hook(add)
    return gradients


def _over_ranks(entry: Entry, gradient: torch.Tensor, mesh: Mesh, config: Config) -> torch.Tensor:
    """The logical gradient from what `_watch_gradients` saw on all ranks: mean over data, sum or union over tensor."""
    if not entry.sharded and config.parallel.zero_stage >= 2 and mesh.tensor.size > 1:
        # the engine's own hook has run before and has summed it
        gradient = gradient / mesh.tensor.size
    whole = entry.put(gradient).contiguous() if entry.sharded else gradient[: entry.shape[0]].clone()
    for group in (mesh.data, mesh.tensor):
        dist.all_reduce(whole, group=group.handle)
    return whole / mesh.data.size


@functools.cache
def reference_trace(config: Config) -> Trace:
    """The same `STEPS` iterations in this process, a depth group at a time."""
    training, optimizer = config.training, config.optimizer
    model, registry = build_model(config.model, config.data.vocab_size, training.seed)
    if training.precision == "fp64":
        model.double()
    first_moment = {entry.name: torch.zeros_like(entry.parameter) for entry in registry}
    second_moment = {entry.name: torch.zeros_like(entry.parameter) for entry in registry}
    groups = config.depth.depths_per_step or 1
    losses, norms, autograd, gradient = [], [], {}, {}
    for step in range(1, STEPS + 1):
        start = (step - 1) * training.global_batch_size
        losses.append(_accumulate(config, model, start, groups))
        grads = {entry.name: entry.parameter.grad for entry in registry}
        norm = torch.sqrt(sum((grad.double() ** 2).sum() for grad in grads.values())).item()
        norms.append(norm)
        clip = min(1.0, optimizer.clip_grad / (norm + 1e-6)) if optimizer.clip_grad else 1.0
        rate = learning_rate(optimizer, step, STEPS)
        with torch.no_grad():
            for entry in registry:
                name, weight, grad = entry.name, entry.parameter, grads[entry.name] * clip
                if step == 1:
                    autograd[name] = grads[name][: entry.shape[0]].double()
                    gradient[name] = grad[: entry.shape[0]].clone()
                first_moment[name].lerp_(grad, 1 - optimizer.adam_beta1)
                second_moment[name].mul_(optimizer.adam_beta2).addcmul_(grad, grad, value=1 - optimizer.adam_beta2)
                mean = first_moment[name] / (1 - optimizer.adam_beta1**step)
                root = (second_moment[name] / (1 - optimizer.adam_beta2**step)).sqrt()
                decay = optimizer.weight_decay if weight.dim() > 1 else 0.0
                weight.mul_(1 - rate * decay).sub_(rate * mean / (root + optimizer.adam_eps))
        model.zero_grad()
    weights = {entry.name: entry.parameter.detach()[: entry.shape[0]].clone() for entry in registry}
    return Trace(losses, norms, autograd, gradient, weights)


def _accumulate(config: Config, model: torch.nn.Module, start: int, groups: int) -> float:
    """Backward over one global batch; returns its loss. Gradients that nothing reached are zeros."""
    layout, size = config.model.layout, config.training.global_batch_size // groups
    depths = [0] * groups
    if not layout.is_dense:
        depths = step_depths(
            config.training.seed,
            start,
            sampling=config.depth.depth_sampling,
            groups=groups,
            smallest=config.depth.min_recurrences,
            largest=layout.recurrences,
        )
    total = 0.0
    for group, depth in enumerate(depths):
        ordinals = range(start + group * size, start + (group + 1) * size)
        tokens_BS1 = torch.stack([sample(config, ordinal) for ordinal in ordinals])
        noise = Noise(config.training.seed, tuple(ordinals))
        loss = model(tokens_BS1[:, :-1], tokens_BS1[:, 1:], depth=depth, noise=noise) / groups
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return total


def differences(trace: Trace, reference: Trace, config: Config) -> dict[str, float]:
    """How far two traces are apart, each as a multiple of what the precision allows: at most 1 is equal.

    Losses, norms and gradients: per tensor ‖Δ‖/‖reference‖, 1e-5 in fp32. In fp64 1e-9 for the first loss and
    autograd's gradients, and 1e-6 for what has been through DeepSpeed, whose masters and norm are fp32. Weights:
    largest absolute difference against 0.01 · lr · steps, since Adam turns the rounding of near-zero gradients into
    steps.
    """
    exact, rounded = {"fp32": (1e-5, 1e-5), "fp64": (1e-9, 1e-6)}[config.training.precision]
    found = {
        "first loss": _apart(trace.losses[:1], reference.losses[:1]) / exact,
        "losses": _apart(trace.losses, reference.losses) / rounded,
        "norms": _apart(trace.norms, reference.norms) / rounded,
    }
    assert trace.weights.keys() == reference.weights.keys()
    for name, theirs in reference.weights.items():
        found[f"autograd of {name}"] = _apart(trace.autograd[name], reference.autograd[name]) / exact
        found[f"gradient of {name}"] = _apart(trace.gradient[name], reference.gradient[name]) / rounded
        step = 0.01 * config.optimizer.lr * STEPS
        found[f"weights of {name}"] = (trace.weights[name] - theirs).abs().max().item() / step
    return found


def _apart(ours, theirs) -> float:
    """‖Δ‖/‖reference‖ of two tensors, or of the worst pair of two lists of numbers."""
    if isinstance(ours, list):
        return max(
            _apart(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
            for a, b in zip(ours, theirs, strict=True)
        )
    delta, size = (ours.double() - theirs.double()).norm().item(), theirs.double().norm().item()
    return delta / size if size else delta
