"""Writer of indexed datasets: streamed, resumable, and never half a pair under the final name.

Tokens go to `PREFIX.bin.part` as they come, lengths and document marks to two small part files, so memory
does not grow with the data. `finalize` assembles the `.idx`, syncs both files and renames them, `.idx`
last: a reader needs both, so what it can open is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rgpt.data.content_hash import EMPTY_CHAIN, BlockHash
from megatron_rgpt.data.index_parts import COPY_BYTES, IndexParts, index_part_paths, naming_the_file, open_part
from megatron_rgpt.data.indexed import CODE_OF_DTYPE, IndexedDataset, bin_path, idx_path
from megatron_rgpt.errors import UserError


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
        self.bin_part = part_paths(self.prefix)[0]
        state = resume_from or WriterState()
        with naming_the_file(self.bin_part):
            self.bin_part.parent.mkdir(parents=True, exist_ok=True)
            self._bin = open_part(self.bin_part, state.bin_bytes)
            self._lock()
            self._bin.truncate(state.bin_bytes)
            self._index = IndexParts(self.prefix, sequences=state.sequences, documents=state.documents)
        self._go_to(state)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bin.close()
            raise UserError(f"{self.bin_part}: another process is writing it: wait, or choose another prefix") from None

    def _go_to(self, state: WriterState) -> None:
        self._state = state
        self._bin_bytes, self._max_id = state.bin_bytes, state.max_id
        self._hash = BlockHash.resume(self.bin_part, bytes.fromhex(state.hash_chain), state.bin_bytes)
        self._open_sequence_tokens = 0

    @property
    def num_documents(self) -> int:
        return self._index.documents

    @property
    def num_tokens(self) -> int:
        return self._bin_bytes // self.dtype.itemsize

    @property
    def max_id(self) -> int:
        """The largest token id so far; -1 before the first."""
        return self._max_id

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens to the open sequence."""
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
        self._open_sequence_tokens += len(tokens)

    def end_sequence(self) -> None:
        """Close the open sequence, empty or not."""
        self._close_sequences(np.array([self._open_sequence_tokens], dtype=np.int64))

    def _close_sequences(self, lengths: np.ndarray) -> None:
        """What was appended becomes sequences of these lengths."""
        if int(lengths.sum(dtype=np.int64)) != self._open_sequence_tokens:
            raise ValueError("the lengths do not add up to the tokens")
        self._index.add_sequences(lengths)
        self._open_sequence_tokens = 0

    def end_document(self) -> None:
        """Mark the end of a document after the last closed sequence."""
        self._index.end_documents(np.array([self._index.sequences]))

    def add_document(self, tokens: np.ndarray) -> None:
        """One document of one sequence."""
        self.append(tokens)
        self.end_sequence()
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Many documents of one sequence each: all their tokens in a row, and each one's length."""
        self.append(tokens)
        first = self._index.sequences
        self._close_sequences(lengths)
        self._index.end_documents(np.arange(first + 1, first + len(lengths) + 1))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append a whole pair of the same dtype: its tokens, sequences and documents."""
        if dataset.dtype != self.dtype:
            raise UserError(f"{dataset.prefix}.idx: dtype {dataset.dtype}, but {self.prefix} is {self.dtype}")
        step = COPY_BYTES // self.dtype.itemsize
        first = self._index.sequences
        for start in range(0, dataset.num_tokens, step):
            self.append(dataset.tokens[start : start + step])
        for start in range(0, len(dataset), step):
            self._index.add_sequences(dataset.sequence_lengths[start : start + step])
        self._open_sequence_tokens = 0
        for start in range(1, dataset.num_documents + 1, step):
            self._index.end_documents(dataset.document_indices[start : start + step] + first)

    def rollback(self) -> None:
        """Drop everything since the last `mark`: a document that turned out broken."""
        with naming_the_file(self.bin_part):
            self._bin.flush()
            self._bin.truncate(self._state.bin_bytes)
            self._bin.seek(self._state.bin_bytes)
        self._index.cut(self._state.sequences, self._state.documents)
        self._go_to(self._state)

    def mark(self, *, durable: bool) -> WriterState:
        """The position now, for `rollback`; durable: on disk, for a resume after a kill."""
        if self._open_sequence_tokens:
            raise ValueError("a sequence is open")
        if durable:
            with naming_the_file(self.bin_part):
                self._bin.flush()
                os.fsync(self._bin.fileno())
            self._index.sync()
        self._state = WriterState(
            self._bin_bytes, self._index.sequences, self._index.documents, self._max_id, self._hash.chain.hex()
        )
        return self._state

    def content_hash(self) -> str:
        """The block hash (`content_hash`) of the `.bin` as written so far."""
        return self._hash.hexdigest()

    def finalize(self) -> None:
        """Assemble the index, make both files durable and give them their final names."""
        self.mark(durable=True)
        index = self._index.assemble(self.dtype)
        with naming_the_file(self.bin_part):
            # An older pair under this name loses its index first, so that no mixture can be opened.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self.bin_part, bin_path(self.prefix))
            os.replace(index, idx_path(self.prefix))
            sync_folder(self.bin_part.parent)
        self.close()
        for path in part_paths(self.prefix):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the part files and leave them for a resume."""
        # What a full disk kept from being written was never promised by a durable mark.
        with contextlib.suppress(OSError):
            self._bin.close()
        self._index.close()

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


def part_paths(prefix: str) -> tuple[Path, ...]:
    """The part files of a pair in the making, that of the tokens first."""
    return (Path(f"{prefix}.bin.part"), *index_part_paths(prefix))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
