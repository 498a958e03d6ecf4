"""A layout never changes the result: every cell of the matrix equals one plain process.

Features are data: a new one adds a row to `FEATURES` (and to `_allowed` what it excludes).
"""

from __future__ import annotations

import pytest

from megatron_rgpt.config import Config, Layout
from tests.parity.covering import Cell, all_cells, pairwise_cells
from tests.parity.trace import differences, engine_trace, reference_trace
from tests.ranks import RankPool

# an odd vocabulary, of which the last of 4 ranks holds nothing but padding; a length that is no power of two; with 4
# tensor-parallel ranks one head on each
BASE = Config().changed(
    hidden_size=32,
    num_attention_heads=4,
    seq_length=12,
    vocab_size=257,
    global_batch_size=8,
    lr=1e-3,
    min_lr=1e-4,
    lr_warmup_iters=2,
    clip_grad=0.8,
)

# what a reference does not look at
ONE_LAYOUT = {"zero_stage": 1, "micro_batch_size": 1, "recompute": "none", "tensor_model_parallel_size": 1}
ONE_LAYOUT["pipeline_model_parallel_size"] = 1

# each value: what it changes in the configuration
MODELS = {
    "dense": {"layout": Layout(4)},
    "fixed r": {"layout": Layout(1, 2, 3, 1), "depth_sampling": "fixed", "depths_per_step": 1},
    "uniform, D 1": {"layout": Layout(1, 2, 3, 1), "depth_sampling": "uniform", "depths_per_step": 1},
    "uniform, D 2, r from 0": {
        "layout": Layout(1, 2, 3, 1),
        "depth_sampling": "uniform",
        "depths_per_step": 2,
        "min_recurrences": 0,
    },
    "uniform, D all": {"layout": Layout(1, 2, 3, 1), "depth_sampling": "uniform"},
    "stratified": {"layout": Layout(1, 2, 3, 1), "depth_sampling": "stratified", "depths_per_step": 2},
    "no prelude, no gate": {"layout": Layout(0, 2, 3, 0), "gate": False, "depths_per_step": 1},
}
FEATURES = {
    "model": list(MODELS),
    "zero_stage": [0, 1, 2, 3],
    "data": [1, 2],
    "tensor": [1, 2, 4],
    "pipeline": [1, 2, 3, 4],
    "micro_batch_size": [1, 2],
    "recompute": ["none", "step"],
    "gate_bias": [0.0, 4.0],
    "precision": ["fp32", "fp64"],
}


def _allowed(cell: Cell) -> bool:
    ranks = cell["data"] * cell["tensor"] * cell["pipeline"]
    staged = cell["pipeline"] > 1
    return (
        ranks <= 8
        and (cell["zero_stage"] > 0 or cell["precision"] != "fp64")
        and not (staged and (cell["zero_stage"] > 1 or cell["model"] == "dense"))
        # a stage beside the hub needs a block
        and not (cell["model"] == "no prelude, no gate" and cell["pipeline"] > 3)
    )


def _config(cell: Cell) -> Config:
    values = {name: value for name, value in cell.items() if name not in ("model", "data", "tensor", "pipeline")}
    sizes = {"tensor_model_parallel_size": cell["tensor"], "pipeline_model_parallel_size": cell["pipeline"]}
    model = dict(MODELS[cell["model"]])
    if cell["model"] == "uniform, D all":
        # a depth for each micro-step, which the reference must know
        model["depths_per_step"] = BASE.training.global_batch_size // (cell["micro_batch_size"] * cell["data"])
    return BASE.changed(**model, **values, **sizes)


def _name(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _check(cell: Cell, ranks: RankPool) -> None:
    config = _config(cell)
    reference = reference_trace(config.changed(**ONE_LAYOUT))
    for rank, trace in enumerate(
        ranks.run(engine_trace, config, world=cell["data"] * cell["tensor"] * cell["pipeline"])
    ):
        too_far = {name: ratio for name, ratio in differences(trace, reference, config).items() if ratio > 1}
        assert not too_far, f"rank {rank} of ({_name(cell)}): times the allowed difference: {too_far}"


PAIRWISE = pairwise_cells(FEATURES, _allowed)


@pytest.mark.parametrize("cell", PAIRWISE, ids=_name)
def test_every_layout_computes_what_one_process_does(cell: Cell, ranks: RankPool) -> None:
    _check(cell, ranks)


def test_gpt2s_vocabulary_of_50257_on_four_tensor_parallel_ranks_computes_what_one_process_does(
    ranks: RankPool,
) -> None:
    model = MODELS["uniform, D 1"]
    config = BASE.changed(**model, vocab_size=50257, micro_batch_size=2, gate_bias=0.0, precision="fp32")
    reference = reference_trace(config.changed(**ONE_LAYOUT))
    trace = ranks.run(engine_trace, config.changed(tensor_model_parallel_size=4), world=4)[0]
    assert not {name: ratio for name, ratio in differences(trace, reference, config).items() if ratio > 1}


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in all_cells(FEATURES, _allowed) if cell not in PAIRWISE], ids=_name)
def test_every_layout_of_the_whole_matrix_computes_what_one_process_does(cell: Cell, ranks: RankPool) -> None:
    _check(cell, ranks)
