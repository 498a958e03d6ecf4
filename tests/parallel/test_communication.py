"""What tensor parallelism sends, counted, and what it saves."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.counts import count_parameters
from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import Group, Mesh, MeshShape
from megatron_rgpt.randomness import Noise
from tests.model.models import small_config
from tests.ranks import RankPool

S, B, D = 12, 2, 32


def _received_values(config: ModelConfig, recompute: bool) -> tuple[int, int]:
    """What one forward and backward pass brings to this rank: activation values, and values that are all-reduced."""
    tp = Mesh.build(MeshShape.of(dist.get_world_size(), tensor=dist.get_world_size())).tensor
    model, _ = build_model(config, 257, 1, recompute=recompute, tp=tp)
    received: Counter = Counter()
    gather, scatter, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_reduce

    def counted_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        received["values"] += whole.numel() - part.numel()
        gather(whole, part, group=group)

    def counted_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        received["values"] += whole.numel() - part.numel()
        scatter(part, whole, group=group)

    def counted_reduce(values: torch.Tensor, **keywords) -> None:
        received["reduced"] += values.numel()
        reduce(values, **keywords)

    tokens = torch.randint(257, (B, S), generator=torch.Generator().manual_seed(1))
    with (
        mock.patch.object(dist, "all_gather_into_tensor", counted_gather),
        mock.patch.object(dist, "reduce_scatter_tensor", counted_scatter),
        mock.patch.object(dist, "all_reduce", counted_reduce),
    ):
        model(tokens, tokens, noise=Noise(1, (0, 1))).backward()
    return received["values"], received["reduced"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("recompute", "per_block"), [(False, 8), (True, 11)])
def test_a_step_sends_what_the_formula_says(ranks: RankPool, world: int, recompute: bool, per_block: int) -> None:
    activations, reduced = ranks.run(_received_values, small_config("3", seq_length=S), recompute, world=world)[0]
    # 3 blocks, embedding and head
    assert activations == (3 * per_block + 2 + 2) * (world - 1) * S * B * D // world
    assert reduced == 3 * S * B


def test_the_modulation_adds_no_activation_bytes(ranks: RankPool) -> None:
    with_all = small_config("1+1x3+1", seq_length=S)
    without = small_config("1+1x3+1", seq_length=S, gate=False, anchor=False)
    results = [ranks.run(_received_values, config, False, world=2) for config in (with_all, without)]
    assert results[0] == results[1]


def test_two_tensor_parallel_ranks_hold_little_more_than_half() -> None:
    config = ModelConfig(layout=Layout.parse("2+5x4+2"), hidden_size=512, num_attention_heads=8)
    _, registry = build_model(config, 50257, 1, tp=Group(0, 2))
    held = sum(entry.parameter.numel() for entry in registry)
    # weights, gradients and both moments are all of the parameters' shapes
    assert held / count_parameters(config, 50257).total <= 0.55
