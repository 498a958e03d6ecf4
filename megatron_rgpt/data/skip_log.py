"""Every document that a preprocessing run left out, a line each: `OUTPUT_PREFIX.skipped.txt`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_rgpt.data.encode import Skip
from megatron_rgpt.data.index_parts import naming_the_file, open_part


def skip_log_path(output_prefix: str) -> Path:
    return Path(f"{output_prefix}.skipped.txt")


class SkipLog:
    """Appends lines behind byte `size`, where an earlier try's durable part ends. An empty log leaves no file."""

    def __init__(self, output_prefix: str, size: int) -> None:
        self.path = skip_log_path(output_prefix)
        with naming_the_file(self.path):
            self._file = open_part(self.path, size)
            self._file.truncate(size)

    def add(self, skips: Iterable[Skip]) -> None:
        with naming_the_file(self.path):
            for skip in skips:
                self._file.write(f"{skip.where}: {skip.reason}\n".encode())

    def sync(self) -> int:
        """Make the log durable; returns its size in bytes."""
        with naming_the_file(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        # What a full disk kept from being written was never promised by `sync`.
        with contextlib.suppress(OSError):
            self._file.close()
        drop_if_empty(self.path)


def drop_if_empty(log: Path) -> None:
    """Remove a log that names nothing."""
    if log.exists() and log.stat().st_size == 0:
        log.unlink()


def join_skip_logs(output_prefix: str, parts: Iterable[str]) -> None:
    """The logs of a run's parts as one, in order; theirs are removed."""
    logs = [path for path in map(skip_log_path, parts) if path.exists()]
    if logs:
        target = skip_log_path(output_prefix)
        with naming_the_file(target):
            target.write_bytes(b"".join(path.read_bytes() for path in logs))
    for path in logs:
        path.unlink()
