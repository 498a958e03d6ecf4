"""SentencePiece models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rgpt.errors import UserError

SPACE = "▁"  # how pieces spell a space
BPE = 2


@dataclass(frozen=True)
class ModelOptions:
    """What a `.model` (a protocol buffer, sentencepiece_model.proto) says of how it splits texts."""

    model_type: int
    treat_whitespace_as_suffix: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @classmethod
    def of(cls, model: bytes) -> ModelOptions:
        parts = dict(_fields(model))
        trainer, normalizer = dict(_fields(bytes(parts.get(2, b"")))), dict(_fields(bytes(parts.get(3, b""))))
        return cls(
            model_type=int(trainer.get(3, 1)),
            treat_whitespace_as_suffix=bool(trainer.get(24, False)),
            add_dummy_prefix=bool(normalizer.get(3, True)),
            remove_extra_whitespaces=bool(normalizer.get(4, True)),
        )

    @property
    def merges_stay_within_words(self) -> bool:
        """Byte-pair merges see only what is beside them; a unigram model weighs the whole text at once."""
        leading_space_stays = self.add_dummy_prefix or not self.remove_extra_whitespaces
        return self.model_type == BPE and leading_space_stays and not self.treat_whitespace_as_suffix


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer message: numbers as they are, the rest as bytes."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
            yield key >> 3, value
            continue
        size, at = varint(at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        yield key >> 3, message[at : at + size]
        at += size


class SentencePieceTokenizer:
    """A SentencePiece `.model`. The document's end is its `</s>`, else a piece called `<eod>` or `<|endoftext|>`."""

    def __init__(self, model: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise UserError("--tokenizer-type sentencepiece needs the package: pip install sentencepiece") from None
        try:
            data = Path(model).read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model: {reason}") from None
        self.name = f"sentencepiece:{Path(model).name}"
        self.vocab_size = self._model.vocab_size()
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.eod = self._find_eod()
        self._options = ModelOptions.of(data)
        self.cuts_before_spaces = self._options.merges_stay_within_words and not self._has_pieces_across_spaces()

    def _find_eod(self) -> int | None:
        if self._model.eos_id() >= 0:
            return self._model.eos_id()
        numbers = (self._model.piece_to_id(piece) for piece in ("<eod>", "<|endoftext|>"))
        return next((number for number in numbers if number != self._model.unk_id()), None)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text), dtype=np.int32)

    def _has_pieces_across_spaces(self) -> bool:
        pieces = (self._model.id_to_piece(number) for number in range(self.vocab_size))
        return any(SPACE in piece.lstrip(SPACE) for piece in pieces)

    def encode_continuation(self, text: str) -> np.ndarray:
        # The model itself puts a space in front of a text, where it was trained to.
        return self.encode_array(text[1:] if self._options.add_dummy_prefix else text)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)
