"""What a run will be, before it starts: sizes, FLOPs, memory and layout, as a dictionary and as text (`--dry-run`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_rgpt.config import Config
from megatron_rgpt.kernels.layer_norm import layer_norm_implementation
from megatron_rgpt.model.counts import (
    count_parameters,
    count_sharded,
    executed_flops_per_token,
    paper_flops_per_token,
)
from megatron_rgpt.parallel.layers import padded_vocabulary
from megatron_rgpt.parallel.mesh import hosts_warning
from megatron_rgpt.training.prepare import ResolvedRun


def describe(run: ResolvedRun) -> dict[str, Any]:
    """Counts, FLOPs, memory per rank in bytes, and layout of a resolved run."""
    config, batch, mesh = run.config, run.batch, run.mesh_shape
    model, vocab_size = config.model, config.data.vocab_size
    counts = count_parameters(model, vocab_size)
    layout, tokens = model.layout, batch.global_batch_size * model.seq_length
    executed = executed_flops_per_token(model, vocab_size)
    return {
        "counts": {"total": counts.total, "non_embedding": counts.non_embedding, **asdict(counts)},
        "flops": {
            "paper_forward_per_token": paper_flops_per_token(model),
            "executed_forward_per_token": executed,
            "training_per_iteration_at_full_depth": 3 * executed * tokens,
        },
        "memory_bytes_per_rank": memory_per_rank(run),
        "layout": {
            "model": str(layout),
            "unique_blocks": layout.unique_blocks,
            "block_executions": layout.block_executions(layout.recurrences),
            "vocabulary": vocab_size,
            "padded_vocabulary": padded_vocabulary(vocab_size, mesh.tensor),
            "ranks": mesh.pipeline * mesh.data * mesh.tensor,
            "data_parallel_size": mesh.data,
            "tensor_parallel_size": mesh.tensor,
            "pipeline_parallel_size": mesh.pipeline,
            "pipeline_placement": str(run.pipeline.placement) if run.pipeline else None,
            "pipeline_busy_share": run.pipeline.fill.busy_share if run.pipeline else None,
            "zero_stage": config.parallel.zero_stage,
            "precision": config.training.precision,
            "layer_norm": layer_norm_implementation(),
        },
        "batch": {
            **asdict(batch),
            "train_samples": batch.train_samples,
            "tokens_per_iteration": tokens,
            "tokens": batch.train_iters * tokens,
        },
    }


def memory_per_rank(run: ResolvedRun) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer under ZeRO, exact but for padding; activations as an estimate at R.

    In a pipeline, of the stage with the most parameters, and of the micro-batches in flight.
    """
    config, batch, mesh = run.config, run.batch, run.mesh_shape
    model, dp, stage = config.model, mesh.data, config.parallel.zero_stage
    sharded = count_sharded(model, config.data.vocab_size)
    total = count_parameters(model, config.data.vocab_size).total
    parameters = total - sharded + sharded // mesh.tensor
    if run.pipeline is not None:
        parameters = parameters * max(run.pipeline.placement.parameters(model, config.data.vocab_size)) // total
    width = {"fp32": 4, "bf16": 2, "fp64": 8}[config.training.precision]
    accumulated = 4 if width == 2 else 0
    master = max(4, width) if stage > 0 else 0
    weights = parameters * width // (dp if stage == 3 else 1)
    gradients = parameters * (width + accumulated) // (dp if stage >= 2 else 1)
    optimizer = parameters * (2 * max(4, width) + master) // (dp if stage >= 1 else 1)
    activations = _activation_values_per_token(config) * width * batch.micro_batch_size * model.seq_length
    # logits and their gradient, fp32 at least
    activations += 2 * config.data.vocab_size * max(4, width) * batch.micro_batch_size * model.seq_length
    # a micro-batch's activations are spread over the stages, about one per stage is in flight
    activations //= mesh.tensor
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "activations_estimate": activations}
    return {**parts, "total_estimate": sum(parts.values())}


def _activation_values_per_token(config: Config) -> int:
    """Values that the backward pass keeps, by what each product and each elementwise operation saves."""
    D, layout = config.model.hidden_size, config.model.layout
    # two norms' inputs and outputs, q, k, v, attention's output, MLP's 4d twice
    block = 17 * D
    # noisy state, norm in and out, gate's hidden layer twice, gate, proposal, state
    modulation = 8 * D
    step = layout.core * block + modulation
    outside = (layout.prelude + layout.coda) * block
    if config.training.recompute == "step":
        kept = (layout.prelude + layout.coda + layout.recurrences) * D
        return kept + max(block, step if layout.core else 0)
    return outside + layout.recurrences * step


def layout_warnings(run: ResolvedRun, ranks_per_host: int) -> list[str]:
    """Lines about a layout that works, but not well."""
    found = [hosts_warning(run.mesh_shape.tensor, ranks_per_host)]
    if run.pipeline is not None:
        found.append(run.pipeline.fill.warning())
    return [f"warning: {text}" for text in found if text is not None]


def describe_as_text(facts: dict[str, Any]) -> str:
    """The same for people, a line per concern."""
    counts, flops, layout, batch = facts["counts"], facts["flops"], facts["layout"], facts["batch"]
    millions = {name: count / 1e6 for name, count in counts.items()}
    memory = {name: _bytes(size) for name, size in facts["memory_bytes_per_rank"].items()}
    lines = {
        "model": f"{layout['model']}, {layout['unique_blocks']} unique blocks, {layout['block_executions']} executed",
        "parameters": f"{millions['total']:.2f} M: {millions['non_embedding']:.2f} M without embeddings, "
        f"{millions['modulation']:.2f} M modulation",
        "vocabulary": f"{layout['vocabulary']}, padded to {layout['padded_vocabulary']}",
        "FLOPs": f"{flops['paper_forward_per_token'] / 1e6:.1f} M forward per token by Eq. 1, "
        f"{flops['executed_forward_per_token'] / 1e6:.1f} M executed with the head",
        "batch": f"{batch['global_batch_size']} samples, {batch['tokens_per_iteration']} tokens: "
        f"{batch['micro_steps']} micro-steps x {batch['data_parallel_size']} x {batch['micro_batch_size']}, "
        f"{batch['depths_per_step']} depth groups",
        "run": f"{batch['train_iters']} iterations, {batch['train_samples']} samples, "
        f"{batch['tokens'] / 1e9:.3f} B tokens",
        "ranks": f"{layout['ranks']}: pipeline {layout['pipeline_parallel_size']} x data "
        f"{layout['data_parallel_size']} x tensor {layout['tensor_parallel_size']}",
        "engine": f"ZeRO-{layout['zero_stage']}, {layout['precision']}, LayerNorm by {layout['layer_norm']}",
        "memory": f"{memory['total_estimate']} a rank: weights {memory['weights']}, gradients {memory['gradients']}, "
        f"optimizer {memory['optimizer']}, activations about {memory['activations_estimate']}",
    }
    if layout["pipeline_placement"] is not None:
        lines["pipeline"] = (
            f"{layout['pipeline_placement']}, stages busy for {layout['pipeline_busy_share']:.0%} of a step by plan"
        )
    if "data" in facts:
        lines["data"] = facts["data"]
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
