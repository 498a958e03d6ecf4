"""Pairwise covering arrays: few cells in which every two values of different features meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def all_cells(features: Mapping[str, Sequence[Any]], allowed: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """Every combination of one value per feature that is allowed."""
    cells = (dict(zip(features, values, strict=True)) for values in itertools.product(*features.values()))
    return [cell for cell in cells if allowed(cell)]


def pairwise_cells(
    features: Mapping[str, Sequence[Any]], allowed: Callable[[Cell], bool] = lambda cell: True
) -> list[Cell]:
    """A subset of `all_cells` that covers every pair of values which some allowed cell has; greedy, deterministic."""
    cells = all_cells(features, allowed)
    open_pairs = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while open_pairs:
        best = max(cells, key=lambda cell: len(open_pairs & _pairs(cell)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple]:
    return set(itertools.combinations(cell.items(), 2))
