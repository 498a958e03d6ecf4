"""Speed and memory between two log lines."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Counts iterations and forward FLOPs since the last report."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start an interval."""
        self._iterations, self._forward_flops = 0, 0
        self._start = time.perf_counter()

    def count(self, forward_flops: int) -> None:
        """One iteration of this many forward FLOPs over all ranks is done."""
        self._iterations += 1
        self._forward_flops += forward_flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a save out of the interval."""
        paused_at = time.perf_counter()
        yield
        self._start += time.perf_counter() - paused_at

    def seconds_per_iteration(self) -> float:
        return (time.perf_counter() - self._start) / max(1, self._iterations)

    def tflops_per_rank(self, ranks: int) -> float:
        """Model TFLOP/s: the backward pass costs two forward passes."""
        seconds = time.perf_counter() - self._start
        return 3 * self._forward_flops / seconds / ranks / 1e12


def peak_memory_gib() -> float:
    """Most memory this process has held: on its GPU, or in all without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
