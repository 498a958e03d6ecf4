"""Parameters know their logical shape, and which slice of it a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import Group
from megatron_rgpt.parallel.registry import Registry
from tests.model.models import small_config

VOCABULARY = 257


@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_of_all_ranks_are_the_logical_weights(size: int) -> None:
    _, whole = build_model(small_config(seq_length=12), VOCABULARY, seed=3)
    parts = [build_model(small_config(seq_length=12), VOCABULARY, 3, tp=Group(r, size))[1] for r in range(size)]
    for entry in whole:
        assert all(part[entry.name].shape == entry.shape for part in parts)
        total = sum(part[entry.name].put(part[entry.name].parameter.detach()) for part in parts)
        assert torch.equal(total, entry.parameter[: entry.shape[0]]), entry.name
        for part in parts:
            own = part[entry.name]
            assert torch.equal(own.take(total), own.parameter), entry.name


def test_query_key_and_value_of_a_head_stay_together() -> None:
    _, whole = build_model(small_config(seq_length=12), VOCABULARY, seed=3)
    _, second = build_model(small_config(seq_length=12), VOCABULARY, 3, tp=Group(1, 2))
    logical = whole["core.0.attention.qkv.weight"].parameter.view(3, 4, 8, 32)
    held = second["core.0.attention.qkv.weight"].parameter.view(3, 2, 8, 32)
    assert torch.equal(held, logical[:, 2:])


def test_a_rank_may_hold_nothing_but_padding_of_the_vocabulary() -> None:
    _, last = build_model(small_config(seq_length=12), VOCABULARY, 3, tp=Group(3, 4))
    tokens = last["embedding.tokens"]
    assert tokens.held == (128, 32) and tokens.padded == (512, 32) and tokens.shape == (257, 32)
    assert not tokens.parameter.any()


def test_only_sharded_parameters_carry_deepspeeds_mark() -> None:
    _, registry = build_model(small_config(seq_length=12), VOCABULARY, 3, tp=Group(0, 2))
    marked = {entry.name for entry in registry if entry.parameter.tensor_model_parallel}
    assert marked == {
        name
        for name in (entry.name for entry in registry)
        if name == "embedding.tokens"
        or ".qkv." in name
        or ".up." in name
        or name.endswith(("out.weight", "down.weight"))
    } - {"rule.gate.out.weight"}


def test_a_parameter_without_a_declaration_never_reaches_the_optimizer() -> None:
    with pytest.raises(TypeError, match=r"parameter 0.weight was not declared"):
        Registry(nn.Sequential(nn.Linear(2, 2)))


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    _, registry = build_model(small_config(), VOCABULARY, seed=3)
    decayed, plain = registry.optimizer_groups(0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(registry)
