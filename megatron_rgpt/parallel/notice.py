"""Notice to leave: a signal that asks this process to end becomes a flag, and the training loop acts on it.

SLURM's `--signal`, `scancel`, a preempted job, a terminated launcher and a lost one (`orphans.py`) all send SIGTERM or
SIGUSR1, to some ranks sooner than to others. A rank that left at once would take the others down in the middle of a
step; so the ranks combine their flags once an iteration, save, and leave together.
"""

from __future__ import annotations

import os
import signal
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Notice:
    """What `signals` have asked for since this was made. Make it first thing in the main thread.

    Outside `deferred` there is nothing to save, and a signal ends the process at once, as it would by default; inside,
    it is remembered for the loop.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self.received: str | None = None
        """The name of the first signal that came while deferred, if any."""
        self.started = time.monotonic()
        self._deferred = False
        for number in signals:
            signal.signal(number, self._take)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals wait for whoever reads `received`."""
        self._deferred = True
        yield
        self._deferred = False

    def _take(self, number: int, frame: types.FrameType | None) -> None:
        if not self._deferred:
            # without the handlers of Python's end, which may wait for other ranks
            os._exit(128 + number)
        self.received = self.received or signal.Signals(number).name
