"""Ranks for tests: run a function on N gloo ranks, in well under a second each time.

A fork server imports torch and DeepSpeed once; every `RankPool.run` forks its ranks from it. Ranks are
not reused: DeepSpeed and torch keep process groups, engines, caches and random state in globals, and a fresh
fork (tens of milliseconds) is the only reset that is sure to reach all of it.

    def total(value: float) -> float:                  # at module level, so that ranks can import it
        tensor = torch.tensor(value * dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum(ranks: RankPool) -> None:             # the session-wide pool of conftest.py
        assert ranks.run(total, 2.0, world=2) == [2.0, 2.0]

Arguments and results are pickled: tensors travel by value. A rank sees the environment of the first `run` of
the test session, not what a test's `monkeypatch` set since: pass such things as arguments.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from typing import Any

# What a test that initializes DeepSpeed would otherwise import in each rank.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tests.ranks",
]
# Read when the fork server imports torch and DeepSpeed. Tests of ranks are CPU tests, also on a machine with GPUs.
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class RankError(Exception):
    """What happened on a rank: its number and the text of its traceback, or how it ended."""


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world: int
    store_port: int
    timeout_seconds: float


class RankPool:
    """A source of up to `size` gloo ranks on this machine. Use it as a context manager, or call `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: list[_Rank] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, world: int, timeout_seconds: float = 180.0) -> list[Any]:
        """Run `function(*args)` on ranks 0..world-1 of a fresh default process group; results by rank.

        `function` lives at the top of a module (or is a `functools.partial` of such a one). Within it torch's
        and DeepSpeed's process groups are ready, RANK, WORLD_SIZE, LOCAL_RANK and the like are set, and torch
        uses one thread.

        If a rank raises, the others are ended at once and its exception is raised here, caused by a `RankError`
        that names the rank and holds its traceback. A rank that dies, or a run longer than
        `timeout_seconds` (each rank then prints its stacks to stderr), raises `RankError`.
        """
        with self._started(function, args, world, timeout_seconds):
            return self._gather(timeout_seconds)

    def outcomes(
        self, function: Callable[..., Any], *args: Any, world: int, timeout_seconds: float = 180.0
    ) -> list[Any]:
        """As `run`, but a rank that fails ends nobody: for each rank its result, or a `RankError` that tells its end.

        A rank that raised leaves at once, as a process of a job does. A rank that does not end raises `RankError`.
        """
        with self._started(function, args, world, timeout_seconds):
            return self._gather(timeout_seconds, ends_all=False)

    @contextmanager
    def _started(
        self, function: Callable[..., Any], args: tuple[Any, ...], world: int, timeout_seconds: float
    ) -> Iterator[None]:
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world}: this pool has ranks for 1..{self.size}")
        # Imported late: the fork server, too, imports this module, and tests without ranks need no torch.
        from torch.distributed import TCPStore

        # The store lives here, on a port the kernel picked: no rank can find it taken.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            with _environment(SERVER_ENVIRONMENT):
                forkserver.ensure_running()
            for rank in range(world):
                job = _Job(function, args, rank, world, store.port, timeout_seconds)
                self._running.append(_Rank(self._context, job))
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End whatever ranks still run."""
        for rank in self._running:
            rank.kill()
        self._running = []

    def _gather(self, timeout_seconds: float, ends_all: bool = True) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while waiting := [rank for rank in self._running if rank.number not in results]:
            sources = {rank.pipe: rank for rank in waiting}
            ready = connection.wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(str(rank.number) for rank in waiting)
                raise RankError(f"timeout: no result after {timeout_seconds:g} s from rank {missing}")
            for pipe in ready:
                rank = sources[pipe]
                results[rank.number] = self._receive(rank) if ends_all else rank.outcome()
        for rank in self._running:
            rank.release()
        return [results[number] for number in range(len(self._running))]

    def _receive(self, rank: _Rank) -> Any:
        try:
            result, error, text = pickle.loads(rank.pipe.recv_bytes())
        except EOFError:
            raise RankError(f"{rank.label} {rank.how_it_ended()}") from None
        if text is None:
            return result
        # A rank whose peer was killed fails on the cut connection: the peer's death is the news.
        for other in self._running:
            if other is not rank and other.has_died():
                raise RankError(f"{other.label} {other.how_it_ended()}; then {rank.label}: {text}") from None
        cause = RankError(f"{rank.label} raised:\n{text}")
        if error is None:
            raise cause
        raise error from cause


class _Rank:
    """One forked process and the pipe to it."""

    def __init__(self, context: Any, job: _Job) -> None:
        self.number = job.rank
        self.label = f"rank {job.rank} of {job.world}"
        self.pipe, theirs = context.Pipe()
        # Daemonic: a test session that is itself cut short leaves no rank behind.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        # Plain pickle, not Process's own pickler, to which torch teaches sharing tensors by file descriptor.
        self.pipe.send_bytes(pickle.dumps(job))

    def has_died(self) -> bool:
        """Whether the process ended without a report. A killed process may take a moment to be reaped."""
        return bool(connection.wait([self._process.sentinel], timeout=0.2)) and not self._has_report()

    def how_it_ended(self) -> str:
        self._process.join(10)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended without a result (exit code {code})"

    def outcome(self) -> Any:
        """The result, or a `RankError`; a rank that failed is let go."""
        try:
            result, _, text = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            return RankError(f"{self.label} {self.how_it_ended()}")
        if text is None:
            return result
        self.release()
        return RankError(f"{self.label} raised:\n{text}")

    def release(self) -> None:
        """Let a rank that has reported leave."""
        # one that has left already does not listen
        with suppress(OSError):
            self.pipe.send_bytes(b"leave")
        self._process.join(10)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _has_report(self) -> bool:
        try:
            return self.pipe.poll() and bool(self.pipe.recv_bytes())
        except EOFError:
            return False


def _serve(pipe: connection.Connection) -> None:
    """The life of a rank: take the job, join the group, run the function, report, wait to be let go."""
    try:
        job = pickle.loads(pipe.recv_bytes())
        # If the run hangs, show where, before the test process ends this one.
        faulthandler.dump_traceback_later(max(0.1, job.timeout_seconds - 0.5), exit=False)
        _join_group(job)
        report = pickle.dumps((job.function(*job.args), None, None))
    except BaseException as error:
        report = _failure(error)
    pipe.send_bytes(report)
    # Leaving early would cut connections that slower ranks still use, and hide the first error behind theirs.
    pipe.recv_bytes()
    # Straight out: the handlers of torch and DeepSpeed at exit wait for peers that may be gone.
    os._exit(0)


def _join_group(job: _Job) -> None:
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.store_port),
    )
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # DeepSpeed would compile its shared-memory collectives at the first init on a CPU: 10-30 s, and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=job.timeout_seconds)
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=timeout)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=timeout)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        report = pickle.dumps((None, error, text))
        pickle.loads(report)
    except Exception:
        return pickle.dumps((None, None, text))
    return report


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
