"""Reader of Megatron-LM's indexed dataset, the pair `PREFIX.bin` and `PREFIX.idx`.

`.bin` holds raw tokens, sequences back to back; `.idx` holds, little endian: the magic and version, the
dtype code, the number of sequences S and of document marks D, then S lengths (i32, tokens), S pointers
(i64, bytes into `.bin`) and D document marks (i64). Opening reads the header and the last entry of each
array, 54 bytes whatever the size; everything else is memory-mapped and read when it is used.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_rgpt.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floats, which NeoX numbers the other way round; tokens are never floats.
DTYPE_OF_CODE = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
# Megatron's writer leaves uint16 a little before it is full.
FIRST_VOCAB_SIZE_OF_INT32 = 65500


def best_dtype(vocab_size: int | None) -> np.dtype:
    """The token dtype Megatron's writer picks: uint16 below 65,500 ids, else (or unknown) int32."""
    small = vocab_size is not None and vocab_size < FIRST_VOCAB_SIZE_OF_INT32
    return np.dtype("<u2") if small else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


@dataclass(frozen=True)
class IndexHeader:
    """What an `.idx` says of itself. Offsets and sizes in bytes."""

    dtype: np.dtype
    sequences: int
    document_marks: int

    @property
    def lengths_offset(self) -> int:
        return HEADER.size

    @property
    def pointers_offset(self) -> int:
        return self.lengths_offset + 4 * self.sequences

    @property
    def marks_offset(self) -> int:
        return self.pointers_offset + 8 * self.sequences

    @property
    def file_size(self) -> int:
        return self.marks_offset + 8 * self.document_marks

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], self.sequences, self.document_marks)


def read_header(path: Path) -> IndexHeader:
    """Read and check the first 34 bytes of an `.idx` and its size.

    Raises:
        UserError: it is missing, unreadable, not an index, truncated, or of a kind that holds no tokens.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            raw = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot read the index ({error.strerror}): check the data prefix") from None
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise UserError(f"{path}: byte 0: not a Megatron index (found {raw[:9]!r}, expected {MAGIC!r})")
    if len(raw) < HEADER.size:
        raise UserError(f"{path}: truncated: {size} bytes, a header alone has {HEADER.size}: make it again")
    _, version, code, sequences, marks = HEADER.unpack(raw)
    if version != VERSION:
        raise UserError(f"{path}: byte 9: index version {version}, this reader knows version {VERSION}")
    if code not in DTYPE_OF_CODE:
        raise UserError(f"{path}: byte 17: dtype code {code} is not an integer type ({sorted(DTYPE_OF_CODE)})")
    header = IndexHeader(DTYPE_OF_CODE[code], sequences, marks)
    if size == header.file_size + sequences and sequences:
        raise UserError(f"{path}: byte {header.file_size}: a multimodal index (it has modes): text only here")
    if size != header.file_size:
        raise UserError(
            f"{path}: byte 18: {sequences} sequences and {marks} document marks need {header.file_size} bytes, "
            f"the file has {size}: it is truncated or damaged: make or copy it again"
        )
    return header


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair, memory-mapped.

    `dataset[i]` is sequence i as a read-only array of the stored dtype; `get(i, offset, length)` a part of
    it; `tokens` all tokens of the file in a row. `sequence_lengths` [S] counts tokens, `sequence_pointers`
    [S] bytes, `document_indices` [documents + 1] sequences.

    Raises:
        UserError: a file is missing, or the sizes of the two disagree.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._header = read_header(idx_path(self.prefix))
        self.dtype = self._header.dtype
        try:
            self._bin_size = bin_path(self.prefix).stat().st_size
        except OSError as error:
            raise UserError(
                f"{bin_path(self.prefix)}: cannot read the tokens ({error.strerror}): check the data prefix"
            ) from None
        self._check_sizes()

    def _check_sizes(self) -> None:
        header, path = self._header, idx_path(self.prefix)
        expected, last_mark = 0, 0
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()
            if header.sequences:
                length = struct.unpack("<i", os.pread(descriptor, 4, header.pointers_offset - 4))[0]
                pointer = struct.unpack("<q", os.pread(descriptor, 8, header.marks_offset - 8))[0]
                expected = pointer + length * header.dtype.itemsize
            if header.document_marks:
                last_mark = struct.unpack("<q", os.pread(descriptor, 8, header.file_size - 8))[0]
        if expected != self._bin_size:
            raise UserError(
                f"{bin_path(self.prefix)}: {self._bin_size} bytes, but {path} (byte {header.marks_offset - 8}) "
                f"ends at byte {expected}: the two are not one whole pair: make or copy both again"
            )
        if last_mark != header.sequences:
            raise UserError(
                f"{path}: byte {header.file_size - 8}: the last document ends at sequence {last_mark}, "
                f"but there are {header.sequences} sequences: make it again"
            )

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        # A worker process maps the files itself.
        return (IndexedDataset, (self.prefix,))

    @cached_property
    def _index_bytes(self) -> np.ndarray:
        return np.memmap(idx_path(self.prefix), mode="r", dtype=np.uint8).view(np.ndarray)

    def _index_array(self, offset: int, count: int, dtype: str) -> np.ndarray:
        # The i64 arrays may lie unaligned: numpy views them all the same.
        return np.ndarray((count,), dtype=dtype, buffer=self._index_bytes, offset=offset)

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        return self._index_array(self._header.lengths_offset, self._header.sequences, "<i4")

    @cached_property
    def sequence_pointers(self) -> np.ndarray:
        return self._index_array(self._header.pointers_offset, self._header.sequences, "<i8")

    @cached_property
    def document_indices(self) -> np.ndarray:
        return self._index_array(self._header.marks_offset, self._header.document_marks, "<i8")

    @cached_property
    def tokens(self) -> np.ndarray:
        if self._bin_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(bin_path(self.prefix), mode="r", dtype=self.dtype).view(np.ndarray)

    @property
    def num_tokens(self) -> int:
        return self._bin_size // self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        return max(0, self._header.document_marks - 1)

    def __len__(self) -> int:
        return self._header.sequences

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens offset..offset+length of sequence `index` (to its end where length is None)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        whole = int(self.sequence_lengths[index])
        length = whole - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(f"tokens {offset}..{offset + length} of a sequence of {whole}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]
