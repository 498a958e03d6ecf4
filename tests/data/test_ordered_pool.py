from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatron_rgpt.data import ordered_pool
from megatron_rgpt.data.ordered_pool import OrderedPool
from megatron_rgpt.errors import UserError


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_tasks_order_whatever_each_costs(workers: int) -> None:
    with OrderedPool(lambda task: sum(range(task)), workers) as pool:
        tasks = [200_000 if i % 7 == 0 else 10 for i in range(100)]
        assert list(pool.map(iter(tasks), lambda task: 1)) == [(task, sum(range(task))) for task in tasks]


def test_only_a_few_tasks_are_taken_ahead() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        while taken < 100:
            taken += 1
            yield taken

    with OrderedPool(lambda task: task, 3) as pool:
        for done, _ in enumerate(pool.map(tasks(), lambda task: 1), start=1):
            assert taken - done < ordered_pool.AHEAD_PER_WORKER * 3


def test_large_tasks_are_taken_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_pool, "AHEAD_BYTES", 10)
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        while taken < 10:
            taken += 1
            yield taken

    with OrderedPool(lambda task: task, 3) as pool:
        for done, _ in enumerate(pool.map(tasks(), lambda task: 11), start=1):
            assert taken == done


def test_a_worker_that_dies_is_named_and_does_not_hang() -> None:
    def work(task: int) -> int:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with (
        pytest.raises(UserError, match=r"--workers: process \d+ died with exit code -9"),
        OrderedPool(work, 2) as pool,
    ):
        list(pool.map(iter(range(10)), lambda task: 1))


def test_an_error_in_a_worker_keeps_its_trace_and_a_users_error_its_line() -> None:
    def work(task: int) -> int:
        raise UserError("the line") if task else ZeroDivisionError

    with OrderedPool(work, 2) as pool, pytest.raises(UserError, match=r"^the line$"):
        list(pool.map(iter([1]), lambda task: 1))
    with OrderedPool(work, 2) as pool, pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(pool.map(iter([0]), lambda task: 1))
