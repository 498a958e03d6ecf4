"""Signals that ask a run to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rgpt.parallel.notice import Notice


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_deferred_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    notice = Notice()
    with notice.deferred():
        os.kill(os.getpid(), number)
    assert notice.received == number.name


def test_the_first_signal_is_the_one_reported() -> None:
    notice = Notice()
    with notice.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert notice.received == "SIGUSR1"


def test_a_signal_before_or_after_the_loop_ends_the_process_at_once() -> None:
    code = "import os, signal; from megatron_rgpt.parallel.notice import Notice; notice = Notice()\n"
    code += "with notice.deferred(): pass\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, "")
