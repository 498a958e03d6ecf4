"""A worker's part of preprocessing: a chunk of text to token ids, document by document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rgpt.data.chunks import Chunk, Lines, Piece, PieceEnd, Texts
from megatron_rgpt.data.giant import BadDocument
from megatron_rgpt.data.inputs import DamagedInput, InputFile, read_whole
from megatron_rgpt.data.tokenizers.base import Tokenizer
from megatron_rgpt.errors import UserError

EMPTY = "empty document"


@dataclass(frozen=True)
class Skip:
    """A document left out: where it stands and why."""

    where: str
    reason: str

    @property
    def harmless(self) -> bool:
        """An empty document is no fault of the input: it is counted, and never stops a run."""
        return self.reason == EMPTY


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk: for each key all tokens in a row and each document's length.

    Of a piece it is the tokens alone, under its key; a skip there spoils the whole document.
    """

    tokens: tuple[np.ndarray, ...]
    lengths: tuple[np.ndarray, ...]
    skips: list[Skip] = field(default_factory=list)


class Encoder:
    """Tokenizes chunks: the text under each of `keys` for JSON lines, whole files for text."""

    def __init__(self, tokenizer: Tokenizer, keys: Sequence[str], *, append_eod: bool, dtype: np.dtype) -> None:
        self._tokenizer = tokenizer
        self._keys = tuple(keys)
        self.end = np.array([tokenizer.eod] if append_eod else [], dtype=dtype)
        self._dtype = dtype

    def __call__(self, chunk: Chunk) -> Encoded:
        work = chunk.work
        if isinstance(work, Lines):
            documents = self._of_lines(work)
        elif isinstance(work, Texts):
            documents = self._of_files(work)
        elif isinstance(work, Piece):
            return self._of_piece(work)
        else:
            reason = work.failure if isinstance(work, PieceEnd) else work.reason
            return Encoded(self._join([]), self._lengths([]), [Skip(work.where, reason)] if reason else [])
        good: list[list[np.ndarray]] = []
        skips: list[Skip] = []
        for document in documents:
            (skips if isinstance(document, Skip) else good).append(document)  # type: ignore[arg-type]
        return Encoded(self._join(good), self._lengths(good), skips)

    def _join(self, documents: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
        columns: Sequence[Sequence[np.ndarray]] = list(zip(*documents, strict=True)) or [[] for _ in self._keys]
        parts = [[part for ids in column for part in (ids, self.end)] for column in columns]
        empty = np.empty(0, dtype=self._dtype)
        return tuple(np.concatenate([empty, *column], dtype=self._dtype, casting="unsafe") for column in parts)

    def _lengths(self, documents: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
        columns: Sequence[Sequence[np.ndarray]] = list(zip(*documents, strict=True)) or [[] for _ in self._keys]
        return tuple(np.array([len(ids) + len(self.end) for ids in column], dtype=np.int64) for column in columns)

    def _of_lines(self, work: Lines) -> Iterator[list[np.ndarray] | Skip]:
        for number, line in enumerate(work.data.split(b"\n"), start=work.first_line):
            if line and not line.isspace():
                try:
                    yield [self._ids(text, self._tokenizer.encode_array) for text in self._texts_of_line(line, number)]
                except BadDocument as reason:
                    yield Skip(f"{work.name}{number}", str(reason))

    def _texts_of_line(self, line: bytes, number: int) -> list[str]:
        try:
            content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise BadDocument(f"invalid UTF-8 at byte {error.start} of the line") from None
        except (ValueError, RecursionError) as error:
            kind = "NUL bytes" if b"\x00" in line else "broken JSON"
            raise BadDocument(f"{kind}: {error}") from None
        if not isinstance(content, dict):
            raise BadDocument(f"not a JSON object but {type(content).__name__}")
        texts = []
        for key in self._keys:
            if key not in content:
                raise BadDocument(f"no key {key!r}")
            text = content[key]
            if not isinstance(text, str):
                raise BadDocument(f"{key!r} is not a string but {type(text).__name__}")
            texts.append(text)
        # Only an escape can smuggle half a surrogate pair into a string.
        if b"\\u" in line:
            for text in texts:
                _refuse_lone_surrogates(text)
        return texts

    def _of_files(self, work: Texts) -> Iterator[list[np.ndarray] | Skip]:
        for file in work.files:
            try:
                yield [self._ids(_text_of_file(file), self._tokenizer.encode_array)]
            except BadDocument as reason:
                yield Skip(file.path, str(reason))

    def _of_piece(self, work: Piece) -> Encoded:
        try:
            _refuse_lone_surrogates(work.text)
            if not work.text:
                return Encoded((self.end[:0],), ())
            encode = self._tokenizer.encode_array if work.first else self._tokenizer.encode_continuation
            return Encoded((self._ids(work.text, encode),), ())
        except BadDocument as reason:
            return Encoded((), (), [Skip(work.where, str(reason))])

    def _ids(self, text: str, encode: Callable[[str], np.ndarray]) -> np.ndarray:
        if "\x00" in text:
            raise BadDocument("NUL characters in the text")
        try:
            ids = encode(text)
        except UserError as error:
            raise BadDocument(str(error)) from None
        if not len(ids):
            raise BadDocument(EMPTY)
        return ids


def _text_of_file(file: InputFile) -> str:
    try:
        return read_whole(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocument(f"invalid UTF-8 at byte {error.start}") from None
    except DamagedInput as error:
        raise BadDocument(str(error)) from None
    except OSError as error:
        raise BadDocument(f"cannot read: {error.strerror}") from None


def _refuse_lone_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadDocument("half a surrogate pair in the text") from None
