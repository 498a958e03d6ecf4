"""A rank does not outlive its launcher.

SIGTERM to a single-node `deepspeed` kills only its runner: the process that started the ranks and the ranks
themselves train on, unseen, on GPUs that look free to their owner. So each rank watches its launcher and, when that is
gone, sends itself SIGTERM, which the training loop answers by saving and leaving.

Why a thread that looks every two seconds, and not Linux's "signal at parent's death": the process that dies is
not the parent but the parent's parent; and a rank that is stuck must be ended in the end, which takes a second step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Launchers whose processes stay as long as the ranks should. A rank started by hand ("environment", "python") may
# well be meant to outlive the shell that started it.
SUPERVISING = ("deepspeed", "torchrun", "srun", "Open MPI", "MPICH")

PERIOD_SECONDS = 2.0
# Long enough to write a checkpoint after SIGTERM.
GRACE_SECONDS = 300.0


def leave_when_orphaned(launcher: str) -> None:
    """Start the watch in a thread, if this launcher is one that ranks should not outlive."""
    if launcher in SUPERVISING:
        gone = launcher_watch()
        threading.Thread(target=_watch, args=(gone,), name="launcher watch", daemon=True).start()


def launcher_watch() -> Callable[[], bool]:
    """A function that tells whether the launcher that lives now has died since.

    The launcher is the parent and, above DeepSpeed's per-node process, DeepSpeed's runner (where /proc shows it).
    """
    parent = os.getppid()
    grandparent = _parent_of(parent)
    watches_grandparent = _is_deepspeed(parent) and grandparent is not None and _is_deepspeed(grandparent)

    def gone() -> bool:
        return os.getppid() != parent or (watches_grandparent and _parent_of(parent) != grandparent)

    return gone


def _watch(gone: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not gone():
        pause.wait(PERIOD_SECONDS)
    rank = os.environ.get("RANK", "?")
    # The launcher may have taken the other end of stderr with it.
    with suppress(OSError):
        print(f"rank {rank}: the launcher is gone; leaving (SIGTERM to myself)", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    pause.wait(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(process: int) -> int | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # "pid (name) state ppid ...", where the name may hold spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[1])


def _is_deepspeed(process: int) -> bool:
    try:
        return b"deepspeed" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
