"""Signals that ask a run to end."""

from __future__ import annotations

import os
import signal
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
def test_a_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    notice = Notice()
    assert notice.received is None
    os.kill(os.getpid(), number)
    assert notice.received == number.name


def test_the_first_signal_is_the_one_reported() -> None:
    notice = Notice()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.received == "SIGUSR1"
