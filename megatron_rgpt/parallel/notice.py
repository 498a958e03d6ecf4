"""Notice to leave: a signal that asks this process to end becomes a flag, and the training loop acts on it.

SLURM's `--signal`, `scancel`, a preempted job, a terminated launcher and a lost one (`orphans.py`) all send SIGTERM or
SIGUSR1, to some ranks sooner than to others. A rank that left at once would take the others down in the middle of a
step; so the ranks combine their flags once an iteration, save, and leave together.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Iterable


class Notice:
    """Remembers whether one of `signals` has come since this was made.

    Make it first thing in the main thread: a signal may come while torch is still being imported, where it
    would end the process.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self.received: str | None = None
        """The name of the first signal that came, if any."""
        for number in signals:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: types.FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
