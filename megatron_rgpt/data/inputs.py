"""The input files of a preprocessing run, in an order that every machine agrees on, and their byte streams."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_rgpt.errors import UserError

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
GZIP_SUFFIXES = (".gz",)
ZSTD_SUFFIXES = (".zst", ".zstd")
FORMATS = ("auto", "jsonl", "text")


class DamagedInput(Exception):
    """A compressed file that ends too early or does not decode; the message says which and why."""


@dataclass(frozen=True)
class InputFile:
    """One input: its format ("jsonl" or "text"), and size and time as they were when the run began."""

    path: str
    format: str
    size: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.endswith(GZIP_SUFFIXES + ZSTD_SUFFIXES)


def list_inputs(
    inputs: Sequence[str], *, suffixes: Sequence[str] = (), exclude: Sequence[str] = (), file_format: str = "auto"
) -> list[InputFile]:
    """Files, folders (searched to the bottom, hidden names left out) and globs, as files.

    Arguments keep their order; what one of them stands for is sorted by the bytes of its path. `suffixes`
    choose within folders; `exclude` are shell patterns, matched against each part of a path below a folder.

    Raises:
        UserError: an input that is not there, or nothing is left.
    """
    paths: list[str] = []
    for argument in inputs:
        if os.path.isdir(argument):
            paths += sorted(_files_below(argument, suffixes, exclude), key=os.fsencode)
        elif os.path.exists(argument):
            paths.append(argument)
        else:
            found = [path for path in glob.glob(argument, recursive=True) if os.path.isfile(path)]
            if not found:
                raise UserError(f"--input {argument}: no such file, folder or match")
            paths += sorted(found, key=os.fsencode)
    if not paths:
        raise UserError(f"--input {' '.join(inputs)}: no files (--suffix {' '.join(suffixes) or 'any'})")
    return [_describe(path, file_format) for path in paths]


def _files_below(folder: str, suffixes: Sequence[str], exclude: Sequence[str]) -> Iterator[str]:
    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatch(name, pattern) for pattern in exclude)

    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if wanted(name)]
        for name in names:
            path = os.path.join(root, name)
            if wanted(name) and (not suffixes or name.endswith(tuple(suffixes))) and os.path.isfile(path):
                yield path


def _describe(path: str, file_format: str) -> InputFile:
    status = os.stat(path)
    if file_format == "auto":
        stem = path
        for suffix in GZIP_SUFFIXES + ZSTD_SUFFIXES:
            stem = stem.removesuffix(suffix)
        file_format = "jsonl" if stem.endswith(JSON_SUFFIXES) else "text"
    return InputFile(path, file_format, status.st_size, status.st_mtime_ns)


class InputStream:
    """The decompressed bytes of one file, at most `limit` behind where `skip` left it.

    `disk_position` counts the bytes of the file that are behind the reader.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        self._path = path
        self._left = sys.maxsize if limit is None else limit
        self._raw: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._compressed = path.endswith(GZIP_SUFFIXES + ZSTD_SUFFIXES)
        self._damage: tuple[type[BaseException], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        self._stream: BinaryIO = self._raw
        if path.endswith(GZIP_SUFFIXES):
            self._stream = gzip.GzipFile(fileobj=io.BufferedReader(self._raw, 1 << 20), mode="rb")
        elif path.endswith(ZSTD_SUFFIXES):
            self._stream = self._open_zstd()

    def _open_zstd(self) -> BinaryIO:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"--input {self._path} needs the package: pip install zstandard") from None
        self._damage += (zstandard.ZstdError,)
        return _WholeFrames(zstandard.ZstdDecompressor(), self._raw)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only before the end.

        Raises:
            DamagedInput: the compressed data is broken or cut off.
            OSError: the file cannot be read.
        """
        parts, missing = [], min(size, self._left)
        while missing and (part := self._read(missing)):
            parts.append(part)
            missing -= len(part)
            self._left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._damage as error:
            raise DamagedInput(f"damaged or truncated: {error}") from None

    def skip(self, size: int) -> None:
        """Go `size` bytes on from the start: by seeking, or by decompressing them."""
        if not self._compressed:
            self._raw.seek(size)
            return
        while size > 0 and (part := self._read(min(size, 1 << 20))):
            size -= len(part)

    @property
    def disk_position(self) -> int:
        return self._raw.tell()

    def __enter__(self) -> InputStream:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._raw.close()


class _WholeFrames(io.RawIOBase):
    """zstd frames one after the other; unlike the library's reader it notices a frame that is cut off."""

    def __init__(self, decompressor: object, raw: BinaryIO) -> None:
        self._decompressor, self._raw = decompressor, raw
        self._frame: object | None = None
        self._unused = b""
        self._ready = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        while not self._ready:
            data = self._unused or self._raw.read(1 << 17)
            self._unused = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return b""
            frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(frame.decompress(data))
            self._unused = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        part, self._ready = self._ready[:size], self._ready[size:]
        return bytes(part)


def read_whole(file: InputFile) -> bytes:
    """All bytes of one file. Raises DamagedInput or OSError."""
    with InputStream(file.path) as stream:
        parts = []
        while part := stream.read(1 << 24):
            parts.append(part)
    return b"".join(parts)


def refuse_changed(files: Sequence[InputFile]) -> None:
    """Raises UserError where a file is no longer what it was when the run began. Lost ones were counted then."""
    for file in files:
        try:
            status = os.stat(file.path)
        except OSError:
            continue
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise UserError(f"{file.path}: changed while it was read: when it is finished, start anew with --overwrite")


def absolute(files: Sequence[InputFile]) -> list[list[object]]:
    """What identifies the inputs of a run: path, size and time of each."""
    return [[str(Path(file.path).resolve()), file.size, file.mtime_ns] for file in files]
