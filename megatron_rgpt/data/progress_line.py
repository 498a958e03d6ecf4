"""The progress line of a long data job: one line rewritten on a terminal, one every ten seconds in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LOG_SECONDS = 10.0
TERMINAL_SECONDS = 0.2


class ProgressLine:
    """Rates count from the construction on: what an earlier, killed run did is not this one's speed."""

    def __init__(self, total_bytes: int, stream: TextIO | None = None) -> None:
        self._total = total_bytes
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = self._last = time.monotonic()
        self._base: tuple[int, int] | None = None

    def update(self, done_bytes: int, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if self._base is None:
            self._base = (0, 0) if documents == 0 else (done_bytes, tokens)
        if now - self._last >= (TERMINAL_SECONDS if self._live else LOG_SECONDS):
            self._last = now
            self._print(self._text(now, done_bytes, documents, tokens), end="\r" if self._live else "\n")

    def finish(self, done_bytes: int, documents: int, tokens: int) -> None:
        self._print(self._text(time.monotonic(), done_bytes, documents, tokens), end="\n")

    def _text(self, now: float, done_bytes: int, documents: int, tokens: int) -> str:
        base_bytes, base_tokens = self._base or (0, 0)
        seconds = max(now - self._start, 1e-9)
        rate = (done_bytes - base_bytes) / seconds
        left = (self._total - done_bytes) / rate if rate else 0.0
        return (
            f"{done_bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB | {documents:,} documents | {tokens:,} tokens | "
            f"{rate / 1e6:.1f} MB/s | {(tokens - base_tokens) / seconds:,.0f} tokens/s | {_clock(left)} left"
        )

    def _print(self, text: str, end: str) -> None:
        print(text.ljust(110) if self._live else text, end=end, file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class PercentLine:
    """How far a job over a known amount is; seen on a terminal alone."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        self._last = time.monotonic()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._stream.isatty() and (now - self._last >= TERMINAL_SECONDS or done == total):
            self._last = now
            print(f"{self._name}: {100 * done / total:.1f} %", end="\r", file=self._stream, flush=True)
