"""The index of a pair in the making: lengths and document marks as they come, on disk, so memory does not grow."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_rgpt.data.indexed import IndexHeader
from megatron_rgpt.errors import UserError

MAX_SEQUENCE_TOKENS = 2**31 - 1
COPY_BYTES = 8 << 20


@contextlib.contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk, a read-only folder) into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot write: {error.strerror}: free space or choose another folder"
        ) from None


def open_part(path: Path, size: int) -> BinaryIO:
    """A part file, opened at byte `size`, which it must have. It is not cut there yet.

    Never in "w" mode: a second writer must not truncate the file before it finds it locked.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)
    have = os.fstat(file.fileno()).st_size
    if have < size:
        raise UserError(f"{path}: {have} bytes, {size} expected to go on: delete the part files and start anew")
    file.seek(size)
    return file


class IndexParts:
    """Two files beside the future `PREFIX.idx`, from which `assemble` makes it."""

    def __init__(self, prefix: str, *, sequences: int = 0, documents: int = 0) -> None:
        self.lengths_path, self.marks_path, self.path = index_part_paths(prefix)
        self._lengths = open_part(self.lengths_path, 4 * sequences)
        self._marks = open_part(self.marks_path, 8 * documents)
        self.sequences, self.documents = sequences, documents
        self.cut(sequences, documents)

    def add_sequences(self, lengths: np.ndarray) -> None:
        """Sequences of so many tokens each.

        Raises:
            UserError: one is longer than the format can say, or the disk is full.
        """
        if lengths.size and int(lengths.max()) > MAX_SEQUENCE_TOKENS:
            raise UserError(
                f"{self.path}: a document of {int(lengths.max())} tokens: the format holds at most "
                f"{MAX_SEQUENCE_TOKENS} in one: split it"
            )
        with naming_the_file(self.lengths_path):
            self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
        self.sequences += len(lengths)

    def end_documents(self, marks: np.ndarray) -> None:
        """Documents that end behind so many sequences each, counted from the file's start."""
        with naming_the_file(self.marks_path):
            self._marks.write(np.ascontiguousarray(marks, dtype="<i8").tobytes())
        self.documents += len(marks)

    def cut(self, sequences: int, documents: int) -> None:
        """Forget everything behind this position."""
        for file, path, size in (
            (self._lengths, self.lengths_path, 4 * sequences),
            (self._marks, self.marks_path, 8 * documents),
        ):
            with naming_the_file(path):
                file.flush()
                file.truncate(size)
                file.seek(size)
        self.sequences, self.documents = sequences, documents

    def sync(self) -> None:
        for file, path in ((self._lengths, self.lengths_path), (self._marks, self.marks_path)):
            with naming_the_file(path):
                file.flush()
                os.fsync(file.fileno())

    def assemble(self, dtype: np.dtype) -> Path:
        """Write the whole index, durably, under its temporary name."""
        self.sync()
        with naming_the_file(self.path), open(self.path, "wb", buffering=1 << 20) as idx:
            idx.write(IndexHeader(dtype, self.sequences, self.documents + 1).pack())
            for block in _blocks(self._lengths):
                idx.write(block)
            pointer = 0
            for block in _blocks(self._lengths):
                sizes = np.frombuffer(block, "<i4").astype(np.int64) * dtype.itemsize
                ends = pointer + np.cumsum(sizes)
                idx.write((ends - sizes).astype("<i8").tobytes())
                pointer = int(ends[-1])
            idx.write(struct.pack("<q", 0))
            for block in _blocks(self._marks):
                idx.write(block)
            idx.flush()
            os.fsync(idx.fileno())
        return self.path

    def close(self) -> None:
        """Close the files and leave them for a resume."""
        for file in (self._lengths, self._marks):
            # What a full disk kept from being written was never promised by `sync`.
            with contextlib.suppress(OSError):
                file.close()


def index_part_paths(prefix: str) -> tuple[Path, Path, Path]:
    """Lengths, document marks, and the index that is made of them."""
    return Path(f"{prefix}.idx.lengths.part"), Path(f"{prefix}.idx.marks.part"), Path(f"{prefix}.idx.part")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(COPY_BYTES):
        yield block
