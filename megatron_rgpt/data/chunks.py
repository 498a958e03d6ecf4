"""Cutting the input files into chunks of work, each with the position behind it.

A chunk is the bytes of whole JSON lines, or a group of whole text files, of about a megabyte. Where chunks
are cut changes nothing in the output: documents keep their order and are tokenized one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rgpt.data.inputs import DamagedInput, InputFile, InputStream

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Position:
    """Where to go on: byte `offset` (decompressed) of file number `file`, which starts line `line` (from 1)."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Lines:
    """Whole JSON lines of one file."""

    path: str
    first_line: int
    data: bytes


@dataclass(frozen=True)
class Texts:
    """Whole text files, each one document; the worker reads them."""

    files: tuple[InputFile, ...]


@dataclass(frozen=True)
class Trouble:
    """A place where reading failed, in place of the work that was there."""

    where: str
    reason: str


Work = Lines | Texts | Trouble


@dataclass(frozen=True)
class Chunk:
    """A piece of work, the position behind it, and the bytes on disk it took."""

    work: Work
    end: Position
    disk_bytes: int


def cut(files: Sequence[InputFile], start: Position) -> Iterator[Chunk]:
    """The chunks of all files from `start` on."""
    number = start.file
    while number < len(files):
        file = files[number]
        if file.format == "text":
            end = number
            size = 0
            while end < len(files) and files[end].format == "text" and (size == 0 or size < CHUNK_BYTES):
                size += files[end].size
                end += 1
            yield Chunk(Texts(tuple(files[number:end])), Position(end), size)
            number = end
            continue
        begin = start if number == start.file else Position(number)
        yield from _cut_lines(file, begin)
        number += 1


def _cut_lines(file: InputFile, begin: Position) -> Iterator[Chunk]:
    number, offset, line = begin.file, begin.offset, begin.line
    behind = Position(number + 1)
    disk = 0
    try:
        with InputStream(file.path) as stream:
            stream.skip(offset)
            rest: list[bytes] = []
            while block := stream.read(CHUNK_BYTES):
                border = block.rfind(b"\n") + 1
                if border == 0:
                    rest.append(block)
                    continue
                data = b"".join([*rest, block[:border]])
                rest = [block[border:]] if border < len(block) else []
                offset += len(data)
                first, line = line, line + data.count(b"\n")
                disk, before = stream.disk_position, disk
                yield Chunk(Lines(file.path, first, data), Position(number, offset, line), disk - before)
            if rest:
                yield Chunk(Lines(file.path, line, b"".join(rest)), behind, file.size - disk)
    except DamagedInput as error:
        yield Chunk(Trouble(f"{file.path}:{line}", str(error)), behind, file.size - disk)
    except OSError as error:
        yield Chunk(Trouble(f"{file.path}:{line}", f"cannot read: {error.strerror}"), behind, file.size - disk)
