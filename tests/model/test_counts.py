"""Counts against the table that defines them, and against the tensors of real models."""

from __future__ import annotations

import pytest

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.counts import count_parameters, executed_flops_per_token, paper_flops_per_token
from megatron_rgpt.model.recurrent import build_model
from tests.model.models import VOCABULARY, small_config

# V = 50,257, S = 1,024: total M, blocks + modulation + final norm M, Eq. 1 MFLOP per token
TABLE = [
    ("12", 768, "124.44", "85.06", "207.6"),
    ("24", 1024, "354.82", "302.31", "704.6"),
    ("36", 1280, "774.03", "708.39", "1604.3"),
    ("1+1x10+1", 768, "63.60", "24.22", "266.6"),
    ("2+5x4+2", 1024, "171.13", "118.62", "746.6"),
    ("1+5x6+5", 1280, "290.29", "224.65", "1702.6"),
    ("2+20x4+2", 1024, "360.07", "307.56", "2508.2"),
    ("3+30x6+3", 1280, "782.23", "716.59", "8387.3"),
]


@pytest.mark.parametrize(("layout", "width", "total", "non_embedding", "mflop"), TABLE)
def test_counts_equal_the_papers_configurations(
    layout: str, width: int, total: str, non_embedding: str, mflop: str
) -> None:
    config = ModelConfig(layout=Layout.parse(layout), hidden_size=width, num_attention_heads=width // 64)
    counts = count_parameters(config, 50257)
    assert f"{counts.total / 1e6:.2f}" == total
    assert f"{counts.non_embedding / 1e6:.2f}" == non_embedding
    assert f"{paper_flops_per_token(config) / 1e6:.1f}" == mflop


@pytest.mark.parametrize("layout", ["3", "1+2x3+1", "0+1x12+0"])
@pytest.mark.parametrize("switches", [{}, {"anchor": False}, {"gate": False}, {"anchor": False, "gate": False}])
def test_counted_parameters_are_those_of_the_model(layout: str, switches: dict) -> None:
    config = small_config(layout, **switches)
    _, registry = build_model(config, VOCABULARY, seed=1)
    assert sum(entry.size for entry in registry) == count_parameters(config, VOCABULARY).total


def test_hoisting_saves_what_the_papers_listing_computes_again_at_every_step() -> None:
    small = ModelConfig()
    dense = paper_flops_per_token(ModelConfig(layout=Layout(12)))
    hoisted = executed_flops_per_token(small, 0)
    unhoisted = executed_flops_per_token(ModelConfig(hoist_anchor=False), 0)
    assert unhoisted == paper_flops_per_token(small)
    assert (round(100 * (unhoisted / dense - 1), 1), round(100 * (hoisted / dense - 1), 1)) == (28.4, 18.2)


@pytest.mark.parametrize(("length", "bound"), [(1024, 1.066), (256, 1.072)])
def test_the_bound_of_hoisting_with_the_head_is_as_derived(length: int, bound: float) -> None:
    hoisted, unhoisted = (ModelConfig(seq_length=length, hoist_anchor=hoist) for hoist in (True, False))
    ratio = executed_flops_per_token(unhoisted, 50257) / executed_flops_per_token(hoisted, 50257)
    assert round(ratio, 3) == bound


def test_executed_flops_at_depth_0_have_no_modulation() -> None:
    config = ModelConfig(layout=Layout.parse("2+5x4+2"))
    assert executed_flops_per_token(config, 0, depth=0) == paper_flops_per_token(ModelConfig(layout=Layout(4)))
