"""The matrix can fail: each fault that breaks a reduction or a slice on purpose is seen by it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from megatron_rgpt.config import Config
from megatron_rgpt.parallel import collectives, cross_entropy
from megatron_rgpt.parallel.mesh import Group
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.randomness import Noise
from megatron_rgpt.training import engine
from tests.parity.test_layouts import BASE, MODELS, ONE_LAYOUT
from tests.parity.trace import Trace, differences, engine_trace, reference_trace
from tests.ranks import RankPool


def _keep_shard(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None


def _mark_every_copy(registry: Registry, model: torch.nn.Module, tp: Group) -> None:
    _REGISTRY_INIT(registry, model, tp)
    for entry in registry:
        entry.parameter.tensor_model_parallel = True


def _count_padding(ctx, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    return _CROSS_ENTROPY_FORWARD(ctx, logits, labels, logits.shape[-1] * tp.size, tp)


def _noise_of_the_first_shard(noise: Noise, purpose: str, step: int, like: torch.Tensor) -> torch.Tensor:
    return _NOISE_DRAW(Noise(noise.seed, noise.ordinals, 0, noise.parts), purpose, step, like)


_REGISTRY_INIT = Registry.__init__
_CROSS_ENTROPY_FORWARD = cross_entropy._CrossEntropy.forward
_NOISE_DRAW = Noise.draw_sBD

# name: (what is replaced, by what, ZeRO stage, what the matrix must complain of)
FAULTS: dict[str, tuple[object, str, Callable, int, str]] = {
    "replicated gradients are not summed": (engine.Engine, "_sum_replicated", lambda self: None, 1, "gradient of"),
    "the hook under ZeRO-2 does not sum": (engine, "_sum", lambda tensor, group: tensor, 2, "gradient of"),
    "the hook under ZeRO-3 does not sum": (engine, "_sum", lambda tensor, group: tensor, 3, "gradient of"),
    "copies are counted in the norm": (Registry, "__init__", _mark_every_copy, 1, "norms"),
    "a gather's backward keeps its shard": (collectives._Gather, "backward", staticmethod(_keep_shard), 1, "autograd"),
    "padding counts in the loss": (cross_entropy._CrossEntropy, "forward", staticmethod(_count_padding), 1, "losses"),
    "shards see the same noise": (Noise, "draw_sBD", _noise_of_the_first_shard, 1, "losses"),
}


def _broken_trace(config: Config, fault: str) -> Trace:
    """`engine_trace` with one thing replaced; this process is a fork of its own."""
    owner, name, broken, _, _ = FAULTS[fault]
    with mock.patch.object(owner, name, broken):
        return engine_trace(config)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_reduction_is_seen(fault: str, ranks: RankPool) -> None:
    _, _, _, stage, complaint = FAULTS[fault]
    config = BASE.changed(
        **MODELS["uniform, D 1"], zero_stage=stage, micro_batch_size=2, gate_bias=0.0, precision="fp32"
    ).changed(tensor_model_parallel_size=2)
    reference = reference_trace(config.changed(**ONE_LAYOUT))
    trace = ranks.run(_broken_trace, config, fault, world=2)[0]
    too_far = [name for name, ratio in differences(trace, reference, config).items() if ratio > 1]
    assert any(complaint in name for name in too_far), too_far
