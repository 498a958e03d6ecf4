"""A checkpoint belongs to the model: saved at one layout, it goes on at any other as if never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rgpt.checkpoint.layout import find_checkpoint
from tests.jobs import flags, job, metrics
from tests.parity.covering import Cell, all_cells, pairwise_cells
from tests.ranks import RankPool

# features of the layout that saves, and of the one that loads; a new dimension of layouts is a row in each
LAYOUT = {"tensor": [1, 2], "pipeline": [1, 2], "data": [1, 2], "zero": [0, 1, 2, 3]}
FEATURES = {f"{when} {name}": values for when in ("save", "load") for name, values in LAYOUT.items()}


def _allowed(cell: Cell) -> bool:
    return all(cell[f"{when} pipeline"] == 1 or cell[f"{when} zero"] < 2 for when in ("save", "load"))


PAIRWISE = pairwise_cells(FEATURES, _allowed)


def _name(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _run(ranks: RankPool, data: str, cell: Cell, when: str, more: str) -> None:
    tensor, pipeline, dp, zero = (cell[f"{when} {name}"] for name in LAYOUT)
    layout = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} --zero-stage {zero}"
    ranks.run(job, flags(data, f"{layout} {more}"), world=tensor * pipeline * dp)


@pytest.fixture(scope="module")
def never_stopped(ranks: RankPool, byte_pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("never_stopped")
    ranks.run(job, flags(byte_pair, f"--save {run}"), world=1)
    return run


def _check(cell: Cell, ranks: RankPool, data: str, run: Path, never_stopped: Path) -> None:
    _run(ranks, data, cell, "save", f"--save {run} --load {run} --exit-interval 3")
    _run(ranks, data, cell, "load", f"--save {run} --load {run}")
    for ours, theirs in zip(metrics(run), metrics(never_stopped), strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5), (ours["iteration"], name)
    mine, its = (_tensors(folder) for folder in (run, never_stopped))
    assert mine.keys() == its.keys()
    # Adam turns the rounding of near-zero gradients into steps: 0.01 · lr · iterations
    apart = {name: (mine[name] - its[name]).abs().max().item() for name in its}
    assert max(apart.values()) <= 0.01 * 1e-2 * 8, max(apart, key=apart.get)


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(str(run))
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("cell", PAIRWISE, ids=_name)
def test_a_run_saved_at_one_layout_goes_on_at_another(
    cell: Cell, ranks: RankPool, byte_pair: str, tmp_path: Path, never_stopped: Path
) -> None:
    _check(cell, ranks, byte_pair, tmp_path / "run", never_stopped)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in all_cells(FEATURES, _allowed) if cell not in PAIRWISE], ids=_name)
def test_a_run_saved_at_any_layout_goes_on_at_any_other(
    cell: Cell, ranks: RankPool, byte_pair: str, tmp_path: Path, never_stopped: Path
) -> None:
    _check(cell, ranks, byte_pair, tmp_path / "run", never_stopped)
