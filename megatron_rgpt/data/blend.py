"""Blending datasets by weight: at each step take the one that lags furthest behind its share.

At step n dataset i lags by w_i·max(n, 1) − count_i; the largest lag is taken, ties by the lowest index
(Megatron-LM's rule, `helpers.cpp` build_blending_indices). The rule is sequential, but two runs that start
from neighbouring counts soon agree. So the steps are cut into segments that run side by side as one numpy
array, each from guessed counts; where a segment's end is not what the next one started from, that one runs
again from the truth. What comes out is the sequential result to the last bit, whatever was guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_rgpt.errors import UserError

MAX_DATASETS = 32767  # the choice is stored as int16
SEGMENT_STEPS = 2048
# Steps run ahead of each segment to forget the guess; more where a small weight makes memory long.
WARM_UP_ROUNDS = 4


def normalised(weights: Sequence[float], names: Sequence[str]) -> np.ndarray:
    """Weights [datasets] as shares that sum to 1.

    Raises:
        UserError: a weight that is not above zero, or too many datasets.
    """
    for weight, name in zip(weights, names, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"--data-path {weight:g} {name}: a weight must be above 0: drop the dataset instead")
    if len(weights) > MAX_DATASETS:
        raise UserError(
            f"--data-path: {len(weights)} datasets, at most {MAX_DATASETS}: merge some (tools/data.py merge)"
        )
    values = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        total = values.sum()
    if not np.isfinite(total):
        raise UserError("--data-path: the weights sum to infinity: scale them down")
    return values / total


def blend_choices(shares: np.ndarray, steps: int, *, segment_steps: int = SEGMENT_STEPS) -> np.ndarray:
    """The dataset [steps], int16, that each step takes; the same for every length of the segments."""
    segments = max(1, -(-steps // segment_steps))
    starts = np.arange(segments, dtype=np.int64) * segment_steps
    counts = _guess(shares, starts, min(segment_steps, WARM_UP_ROUNDS * len(shares)))
    choices = np.empty((segments, segment_steps), dtype=np.int16)
    stale = np.arange(segments)
    ends = np.empty_like(counts)
    while len(stale):
        choices[stale], ends[stale] = _run(shares, starts[stale], counts[stale], segment_steps)
        wrong = np.flatnonzero((ends[:-1] != counts[1:]).any(axis=1)) + 1
        counts[wrong] = ends[wrong - 1]
        stale = wrong
    return choices.reshape(-1)[:steps]


def _guess(shares: np.ndarray, starts: np.ndarray, warm_up: int) -> np.ndarray:
    """Likely counts [segments, datasets] at each start: those of a run warmed up from rounded shares."""
    ahead = np.maximum(starts - warm_up, 0)
    counts = np.floor(ahead[:, None] * shares).astype(np.int64)
    # The counts of n steps must sum to n: hand the missing ones to those that lag most.
    lag = ahead[:, None] * shares - counts
    rank = np.argsort(np.argsort(-lag, axis=1, kind="stable"), axis=1)
    counts += rank < (ahead - counts.sum(axis=1))[:, None]
    counts[starts == 0] = 0
    if len(starts) > 1:
        counts[1:] = _run(shares, ahead[1:], counts[1:], warm_up)[1]
    return counts


def _run(shares: np.ndarray, starts: np.ndarray, counts: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule from each start [segments] and its counts [segments, datasets]: choices, and counts at the end."""
    counts = counts.copy()
    choices = np.empty((len(starts), steps), dtype=np.int16)
    rows = np.arange(len(starts))
    for step in range(steps):
        lag = np.maximum(starts + step, 1).astype(np.float64)[:, None] * shares - counts
        choice = lag.argmax(axis=1)  # the first of equal ones
        choices[:, step] = choice
        counts[rows, choice] += 1
    return choices, counts


def occurrence(choices: np.ndarray) -> np.ndarray:
    """For each step, how often its dataset was taken before: [steps], int64."""
    order = np.argsort(choices, kind="stable")  # groups the steps of each dataset, in their order
    taken = np.bincount(choices) if len(choices) else np.zeros(0, dtype=np.int64)
    within = np.arange(len(choices)) - np.repeat(np.cumsum(taken) - taken, taken)
    index = np.empty(len(choices), dtype=np.int64)
    index[order] = within
    return index


class BlendedDataset:
    """Samples of several datasets in the blend's order: `blend[i]` is an int64 array [seq_length + 1]."""

    def __init__(self, datasets: Sequence, choices: np.ndarray, within: np.ndarray) -> None:
        self.datasets = datasets
        self.choices = choices
        self.within = within

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.datasets[self.choices[index]][self.within[index]]

    def counts(self) -> list[int]:
        """How many samples each dataset gives."""
        return np.bincount(self.choices, minlength=len(self.datasets)).tolist()

    def describe(self, index: int) -> str:
        return self.datasets[self.choices[index]].describe(self.within[index])
