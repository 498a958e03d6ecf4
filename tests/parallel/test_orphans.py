"""Ranks that notice their launcher's death, in real process trees."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_rgpt.parallel.orphans import leave_when_orphaned

REPOSITORY = Path(__file__).parents[2]

RANK = """
import os, signal, sys
from megatron_rgpt.parallel.orphans import leave_when_orphaned
signal.alarm(60)  # should the watch fail, the test still ends
behaviour, _, path = sys.argv[1].partition(" to ")
if behaviour == "saves":
    signal.signal(signal.SIGTERM, lambda *_: (open(path, "w").close(), os._exit(0)))
leave_when_orphaned(sys.argv[2])
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
# Starts the rest of its command line and waits for it, as launchers do; its own command line says "deepspeed".
LAUNCH = "import subprocess, sys; subprocess.run(sys.argv[1:])  # deepspeed"


def tree(*commands: list[str]) -> subprocess.Popen[str]:
    """Start nested processes, the first outermost, and wait until the innermost has printed its process id."""
    command = [part for command in commands for part in command]
    outermost = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    assert outermost.stdout is not None
    assert int(outermost.stdout.readline()) > 0
    return outermost


def kill_and_read(outermost: subprocess.Popen[str]) -> str:
    """End the outermost process; what the others print until the last of them has ended."""
    outermost.kill()
    output, _ = outermost.communicate(timeout=70)
    return output


def launcher() -> list[str]:
    return [sys.executable, "-c", LAUNCH]


def rank(behaviour: str = "", launcher: str = "deepspeed") -> list[str]:
    return [sys.executable, "-c", RANK, behaviour, launcher]


@pytest.mark.parametrize("name", ["deepspeed", "srun"])
def test_a_rank_leaves_when_its_parent_dies(name: str) -> None:
    assert "the launcher is gone" in kill_and_read(tree(launcher(), rank(launcher=name)))


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's parent is read from /proc")
def test_a_rank_leaves_when_the_deepspeed_runner_above_its_parent_dies() -> None:
    assert "the launcher is gone" in kill_and_read(tree(launcher(), launcher(), rank()))


def test_a_rank_may_save_before_it_leaves(tmp_path: Path) -> None:
    kill_and_read(tree(launcher(), rank(f"saves to {tmp_path / 'saved'}")))
    assert (tmp_path / "saved").exists()


def test_a_rank_saves_even_if_its_standard_error_is_gone_too(tmp_path: Path) -> None:
    command = [*launcher(), *rank(f"saves to {tmp_path / 'saved'}")]
    outermost = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert outermost.stdout is not None and outermost.stderr is not None
    assert int(outermost.stdout.readline()) > 0
    outermost.stderr.close()
    outermost.kill()
    # Read to the end, which comes with the last process that holds the pipe.
    outermost.stdout.read()
    outermost.wait()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", ["python", "environment"])
def test_a_process_started_by_hand_is_not_watched_and_may_outlive_its_shell(name: str) -> None:
    before = threading.enumerate()
    leave_when_orphaned(name)
    assert threading.enumerate() == before
