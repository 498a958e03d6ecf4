"""Cutting the input files into chunks of work, each with the position behind it.

A chunk is the bytes of whole JSON lines, or a group of whole text files, of about a megabyte; or a piece of
a document that is too large to hold. Where chunks are cut changes nothing in the output: documents keep
their order, and pieces end only where the tokenizer does not notice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from megatron_rgpt.data import giant
from megatron_rgpt.data.giant import BadDocument, Feed, GiantLine
from megatron_rgpt.data.inputs import DamagedInput, InputFile, InputStream

CHUNK_BYTES = 1 << 20
# A compressed text file may hold this many times its size.
COMPRESSION = 20


@dataclass(frozen=True)
class Position:
    """Where to go on: byte `offset` (decompressed) of file number `file`, which starts line `line` (from 1)."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Lines:
    """Whole JSON lines of one file. `name` and a line's number name the line."""

    name: str
    first_line: int
    data: bytes


@dataclass(frozen=True)
class Texts:
    """Whole text files, each one document; the worker reads them."""

    files: tuple[InputFile, ...]


@dataclass(frozen=True)
class Piece:
    """A part of the text under key number `key` of a document in pieces. `PieceEnd` follows the last one.

    Behind the `first` part of a text the others begin with the space before which it was cut.
    """

    where: str
    key: int
    text: str
    first: bool


@dataclass(frozen=True)
class PieceEnd:
    """The end of a document in pieces, or why it cannot be used after all."""

    where: str
    failure: str | None


@dataclass(frozen=True)
class Trouble:
    """A place where reading failed, in place of the work that was there."""

    where: str
    reason: str


Work = Lines | Texts | Piece | PieceEnd | Trouble


@dataclass(frozen=True)
class Chunk:
    """A piece of work, the position behind it, and the bytes on disk it took."""

    work: Work
    end: Position
    disk_bytes: int

    def held_bytes(self) -> int:
        """About what it takes in memory."""
        if isinstance(self.work, Lines):
            return len(self.work.data)
        if isinstance(self.work, Texts):
            return sum(file.size for file in self.work.files)
        return len(self.work.text) if isinstance(self.work, Piece) else 0


class Cutter:
    """Cuts the files of a run.

    Args:
        files: the inputs.
        keys: the JSON keys whose texts are wanted.
        pieces: whether documents beyond `giant.GIANT_BYTES` come in pieces. If not, each is held whole.
    """

    def __init__(self, files: Sequence[InputFile], keys: Sequence[str], *, pieces: bool) -> None:
        self._files = files
        self._keys = keys
        self._pieces = pieces

    def chunks(self, start: Position, end: Position, origin: Position) -> Iterator[Chunk]:
        """The chunks from `start` to `end`, both starts of documents. Lines are counted from `origin` on."""
        number = start.file
        while number < len(self._files) and Position(number) != end and number <= end.file:
            file = self._files[number]
            if file.format == "text":
                if self._is_giant(file):
                    yield from self._giant_text(number)
                    number += 1
                    continue
                group = self._group(number, min(end.file, len(self._files)))
                yield Chunk(Texts(tuple(group)), Position(number + len(group)), sum(member.size for member in group))
                number += len(group)
                continue
            begin = start if number == start.file else Position(number)
            within = number == origin.file and origin.offset
            name = f"{file.path}:byte {origin.offset}+line " if within else f"{file.path}:"
            yield from self._lines(file, name, begin, end.offset if number == end.file else None)
            number += 1

    def _is_giant(self, file: InputFile) -> bool:
        return self._pieces and file.size * (COMPRESSION if file.compressed else 1) > giant.GIANT_BYTES

    def _group(self, first: int, end: int) -> list[InputFile]:
        """Text files from number `first` on that make up a chunk: at least one."""
        group: list[InputFile] = []
        size = 0
        for file in self._files[first:end]:
            if file.format != "text" or self._is_giant(file) or (group and size + file.size > CHUNK_BYTES):
                break
            group.append(file)
            size += file.size
        return group

    def _giant_text(self, number: int) -> Iterator[Chunk]:
        file = self._files[number]
        here, behind = Position(number), Position(number + 1)
        failure = None
        try:
            with InputStream(file.path) as stream:
                for count, text in enumerate(giant.text_pieces(stream)):
                    yield Chunk(Piece(file.path, 0, text, count == 0), here, 0)
        except (BadDocument, DamagedInput) as error:
            failure = str(error)
        except OSError as error:
            failure = f"cannot read: {error.strerror}"
        yield Chunk(PieceEnd(file.path, failure), behind, file.size)

    def _giant_line(self, feed: Feed, where: str, here: Position) -> Generator[Chunk, None, str | None]:
        """The pieces of the line at the front of a feed, which then stands behind it; returns what was wrong."""
        document = GiantLine(feed, self._keys)
        failure = None
        begun: set[int] = set()
        try:
            for key, text in document.pieces():
                yield Chunk(Piece(where, key, text, key not in begun), here, 0)
                begun.add(key)
        except BadDocument as error:
            failure = str(error)
        clean = document.leave()
        return failure or (None if clean else "broken JSON: more behind the object")

    def _lines(self, file: InputFile, name: str, begin: Position, until: int | None) -> Iterator[Chunk]:
        """The JSON lines of one file from `begin` up to byte `until`."""
        number, line = begin.file, begin.line
        behind = Position(number + 1) if until is None else Position(number, until)
        disk = 0
        try:
            # A file that grows while it is read ends where it ended when the run began.
            end = until if until is not None or file.compressed else file.size
            with InputStream(file.path, limit=None if end is None else end - begin.offset) as stream:
                stream.skip(begin.offset)
                disk = stream.disk_position
                feed = Feed(stream)
                searched = 0
                while feed.more():
                    border = feed.data.rfind(b"\n", searched) + 1
                    searched = len(feed.data)
                    if border:
                        work = Lines(name, line, bytes(feed.data[:border]))
                        feed.drop(border)
                        line += work.data.count(b"\n")
                        searched = len(feed.data)
                        disk, before = stream.disk_position, disk
                        yield Chunk(work, Position(number, begin.offset + feed.offset, line), disk - before)
                    elif self._pieces and len(feed.data) > giant.GIANT_BYTES:
                        where = f"{name}{line}"
                        here = Position(number, begin.offset + feed.offset, line)
                        failure = yield from self._giant_line(feed, where, here)
                        line += 1
                        searched = 0
                        disk, before = stream.disk_position, disk
                        after = Position(number, begin.offset + feed.offset, line)
                        yield Chunk(PieceEnd(where, failure), after, disk - before)
                if feed.data:
                    size = file.size if until is None else until
                    yield Chunk(Lines(name, line, bytes(feed.data)), behind, size - disk)
        except DamagedInput as error:
            yield Chunk(Trouble(f"{name}{line}", str(error)), behind, 0)
        except OSError as error:
            yield Chunk(Trouble(f"{name}{line}", f"cannot read: {error.strerror}"), behind, 0)
