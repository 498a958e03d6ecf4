"""Processes that work on a stream of tasks and hand back the results in the tasks' order, in bounded memory.

Made with fork: what the work needs (a tokenizer) is there at once in every process. The parent is the only
one to read tasks and results; a process that dies is noticed at its pipe and named.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from megatron_rgpt.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

TASKS_PER_WORKER = 2  # one in work, one waiting
AHEAD_PER_WORKER = 4  # tasks between the first unfinished one and the last one begun
AHEAD_BYTES = 64 << 20


class OrderedPool(Generic[Task, Result]):
    """`workers` processes that apply `function`; one worker means this process itself.

    Use as a context manager: leaving it ends the processes.
    """

    def __init__(self, function: Callable[[Task], Result], workers: int) -> None:
        self._function = function
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        if workers <= 1:
            return
        context = multiprocessing.get_context("fork")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A child must not keep the parent's ends open, or nobody would notice the parent's death.
            arguments = (function, theirs, [*self._pipes, ours])
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def map(self, tasks: Iterator[Task], size: Callable[[Task], int]) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in order. At most a few tasks per worker are in memory.

        `size` tells the bytes of a task: beyond `AHEAD_BYTES` no other one joins those in memory.
        """
        if not self._pipes:
            for task in tasks:
                yield task, self._function(task)
            return
        waiting: deque[tuple[int, Task]] = deque()
        results: dict[int, Result] = {}
        load = dict.fromkeys(self._pipes, 0)
        sent, held, more = 0, 0, True
        while True:
            while more and held <= AHEAD_BYTES and len(waiting) < AHEAD_PER_WORKER * len(self._pipes):
                pipe = min(load, key=lambda candidate: load[candidate])
                if load[pipe] >= TASKS_PER_WORKER:
                    break
                task = next(tasks, None)
                if task is None:
                    more = False
                    break
                self._send(pipe, (sent, task))
                waiting.append((sent, task))
                load[pipe] += 1
                held += size(task)
                sent += 1
            if not waiting:
                return
            while waiting and waiting[0][0] in results:
                number, task = waiting.popleft()
                held -= size(task)
                yield task, results.pop(number)
            if waiting:
                for ready in wait([pipe for pipe in self._pipes if load[pipe]]):
                    number, result = self._receive(ready)  # type: ignore[arg-type]
                    results[number] = result
                    load[ready] -= 1  # type: ignore[index]

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except OSError:
            self._name_the_dead(pipe)

    def _receive(self, pipe: Connection) -> tuple[int, Result]:
        try:
            number, result, error = pipe.recv()
        except (EOFError, OSError):
            self._name_the_dead(pipe)
        if isinstance(error, UserError):
            raise error
        if error is not None:
            raise RuntimeError(f"a worker failed:\n{error}")
        return number, result

    def _name_the_dead(self, pipe: Connection) -> None:
        process = self._processes[self._pipes.index(pipe)]
        process.join()
        raise UserError(
            f"--workers: process {process.pid} died with exit code {process.exitcode} (-9 is most often the kernel "
            "when memory is short): use fewer workers; the same command goes on from here"
        )

    def __enter__(self) -> OrderedPool[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(function: Callable, pipe: Connection, parents_ends: list[Connection]) -> None:
    # An interrupt at the terminal reaches the whole group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in parents_ends:
        end.close()
    inbox: queue.SimpleQueue[tuple[int, object] | None] = queue.SimpleQueue()

    def receive() -> None:
        # Always reading keeps the parent's sends from blocking while this process sends a result.
        with contextlib.suppress(EOFError, OSError):
            while True:
                inbox.put(pipe.recv())
        inbox.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while (message := inbox.get()) is not None:
        number, task = message
        try:
            answer = (number, function(task), None)
        except UserError as error:
            answer = (number, None, error)
        except Exception:
            answer = (number, None, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return
