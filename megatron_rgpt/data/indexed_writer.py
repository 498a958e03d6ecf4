"""Writer of indexed datasets: streamed, resumable, and never half a pair under the final name.

Tokens go to `PREFIX.bin.part` as they come, lengths and document marks to two small part files, so memory
does not grow with the data. `finalize` assembles the `.idx`, syncs both files and renames them, `.idx`
last: a reader needs both, so what it can open is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_rgpt.data.content_hash import EMPTY_CHAIN, BlockHash
from megatron_rgpt.data.indexed import CODE_OF_DTYPE, IndexedDataset, IndexHeader, bin_path, idx_path
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


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class WriterState:
    """A position at a sequence's end from which a writer can go on."""

    bin_bytes: int = 0
    sequences: int = 0
    documents: int = 0
    max_id: int = -1
    hash_chain: str = EMPTY_CHAIN.hex()


class IndexedWriter:
    """Writes one pair. As a context manager it finalizes at the end, and on an error removes its part files.

    Args:
        prefix: the pair's path without `.bin` and `.idx`.
        dtype: the stored token type, an integer type of the format.
        resume_from: go on from this state of earlier part files instead of starting anew.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: np.dtype, *, resume_from: WriterState | None = None
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"{self.dtype} is not a token type of the format")
        self.bin_part, self.lengths_part, self.marks_part, self.idx_part = part_paths(self.prefix)
        self._state = resume_from or WriterState()
        with naming_the_file(self.bin_part):
            self.bin_part.parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._open(self.bin_part, self._state.bin_bytes)
            self._lock()
            self._bin.truncate(self._state.bin_bytes)
            self._lengths = self._open(self.lengths_part, 4 * self._state.sequences)
            self._marks = self._open(self.marks_part, 8 * self._state.documents)
            for file in (self._lengths, self._marks):
                file.truncate(file.tell())
        self._bin_bytes, self._sequences = self._state.bin_bytes, self._state.sequences
        self._documents, self._max_id = self._state.documents, self._state.max_id
        self._hash = BlockHash.resume(self.bin_part, bytes.fromhex(self._state.hash_chain), self._bin_bytes)
        self._open_sequence_tokens = 0

    @staticmethod
    def _open(path: Path, size: int) -> BinaryIO:
        # Never "w" mode: a second writer must not truncate the file before it finds it locked.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)
        have = os.fstat(file.fileno()).st_size
        if have < size:
            raise UserError(f"{path}: {have} bytes, {size} expected to go on: delete the part files and start anew")
        file.seek(size)
        return file

    def _lock(self) -> None:
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.bin_part}: another process is writing it: wait, or choose another prefix") from None

    @property
    def num_documents(self) -> int:
        return self._documents

    @property
    def num_tokens(self) -> int:
        return self._bin_bytes // self.dtype.itemsize

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens to the open sequence."""
        self._write_tokens(tokens)
        self._open_sequence_tokens += len(tokens)

    def _write_tokens(self, tokens: np.ndarray) -> None:
        if tokens.size:
            top, limits = int(tokens.max()), np.iinfo(self.dtype)
            if top > limits.max or int(tokens.min()) < limits.min:
                raise ValueError(f"token id {top} does not fit {self.dtype}")
            self._max_id = max(self._max_id, top)
        data = memoryview(np.ascontiguousarray(tokens, dtype=self.dtype)).cast("B")
        with naming_the_file(self.bin_part):
            self._bin.write(data)
        self._hash.update(data)
        self._bin_bytes += len(data)

    def end_sequence(self) -> None:
        """Close the open sequence, empty or not."""
        self._write_lengths(np.array([self._open_sequence_tokens], dtype=np.int64))
        self._open_sequence_tokens = 0

    def _write_lengths(self, lengths: np.ndarray) -> None:
        if lengths.size and int(lengths.max()) > MAX_SEQUENCE_TOKENS:
            raise UserError(
                f"{self.bin_part}: a document of {int(lengths.max())} tokens: the format holds at most "
                f"{MAX_SEQUENCE_TOKENS} in one: split it"
            )
        with naming_the_file(self.lengths_part):
            self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
        self._sequences += len(lengths)

    def end_document(self) -> None:
        """Mark the end of a document after the last closed sequence."""
        with naming_the_file(self.marks_part):
            self._marks.write(struct.pack("<q", self._sequences))
        self._documents += 1

    def add_document(self, tokens: np.ndarray) -> None:
        """One document of one sequence."""
        self.append(tokens)
        self.end_sequence()
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Many documents of one sequence each: all their tokens in a row, and each one's length."""
        if self._open_sequence_tokens or int(lengths.sum()) != len(tokens):
            raise ValueError("lengths must add up to the tokens, and no sequence may be open")
        self._write_tokens(tokens)
        first = self._sequences
        self._write_lengths(lengths)
        with naming_the_file(self.marks_part):
            self._marks.write(np.arange(first + 1, self._sequences + 1, dtype="<i8").tobytes())
        self._documents += len(lengths)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append a whole pair of the same dtype: its tokens, sequences and documents."""
        if dataset.dtype != self.dtype:
            raise UserError(f"{dataset.prefix}.idx: dtype {dataset.dtype}, but {self.prefix} is {self.dtype}")
        step = COPY_BYTES // self.dtype.itemsize
        for start in range(0, dataset.num_tokens, step):
            self._write_tokens(dataset.tokens[start : start + step])
        first = self._sequences
        for start in range(0, len(dataset), step):
            self._write_lengths(dataset.sequence_lengths[start : start + step])
        with naming_the_file(self.marks_part):
            for start in range(1, dataset.num_documents + 1, step):
                marks = dataset.document_indices[start : start + step] + first
                self._marks.write(marks.astype("<i8").tobytes())
        self._documents += dataset.num_documents

    def rollback(self) -> None:
        """Drop everything since the last flush: the open sequence of a document that turned out broken."""
        state = self._state
        with naming_the_file(self.bin_part):
            for file, size in (
                (self._bin, state.bin_bytes),
                (self._lengths, 4 * state.sequences),
                (self._marks, 8 * state.documents),
            ):
                file.flush()
                file.truncate(size)
                file.seek(size)
        self._bin_bytes, self._sequences = state.bin_bytes, state.sequences
        self._documents, self._max_id = state.documents, state.max_id
        self._hash = BlockHash.resume(self.bin_part, bytes.fromhex(state.hash_chain), state.bin_bytes)
        self._open_sequence_tokens = 0

    def mark(self, *, durable: bool) -> WriterState:
        """The position now, for `rollback`; durable: on disk, for a resume after a kill."""
        if self._open_sequence_tokens:
            raise ValueError("a sequence is open")
        if durable:
            for file, path in (
                (self._bin, self.bin_part),
                (self._lengths, self.lengths_part),
                (self._marks, self.marks_part),
            ):
                with naming_the_file(path):
                    file.flush()
                    os.fsync(file.fileno())
        self._state = WriterState(
            self._bin_bytes, self._sequences, self._documents, self._max_id, self._hash.chain.hex()
        )
        return self._state

    def content_hash(self) -> str:
        """The block hash (`content_hash`) of the `.bin` as written so far."""
        return self._hash.hexdigest()

    def finalize(self) -> None:
        """Assemble the index, make both files durable and give them their final names."""
        self.mark(durable=True)
        header = IndexHeader(self.dtype, self._sequences, self._documents + 1)
        with naming_the_file(self.idx_part):
            with open(self.idx_part, "wb", buffering=1 << 20) as idx:
                idx.write(header.pack())
                for block in _blocks(self._lengths):
                    idx.write(block)
                pointer = 0
                for block in _blocks(self._lengths):
                    sizes = np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize
                    ends = pointer + np.cumsum(sizes)
                    idx.write((ends - sizes).astype("<i8").tobytes())
                    pointer = int(ends[-1])
                idx.write(struct.pack("<q", 0))
                for block in _blocks(self._marks):
                    idx.write(block)
                idx.flush()
                os.fsync(idx.fileno())
            # An older pair under this name loses its index first, so that no mixture can be opened.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self.bin_part, bin_path(self.prefix))
            os.replace(self.idx_part, idx_path(self.prefix))
            sync_folder(self.bin_part.parent)
        self.close()
        self.lengths_part.unlink(missing_ok=True)
        self.marks_part.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the part files and leave them for a resume."""
        for file in (self._bin, self._lengths, self._marks):
            # What a full disk kept from being written was never promised by a durable mark.
            with contextlib.suppress(OSError):
                file.close()

    def discard(self) -> None:
        """Close and remove the part files."""
        self.close()
        for path in part_paths(self.prefix):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finalize()
        except UserError:
            self.discard()
            raise


def part_paths(prefix: str) -> tuple[Path, Path, Path, Path]:
    """The part files of a pair in the making: tokens, lengths, document marks, index."""
    return (
        Path(f"{prefix}.bin.part"),
        Path(f"{prefix}.idx.lengths.part"),
        Path(f"{prefix}.idx.marks.part"),
        Path(f"{prefix}.idx.part"),
    )


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(COPY_BYTES):
        yield block
