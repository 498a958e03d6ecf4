"""SentencePiece models."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from megatron_rgpt.errors import UserError


class SentencePieceTokenizer:
    """A SentencePiece `.model`. The document's end is `</s>`, or a piece called `<|endoftext|>` or `<eod>`."""

    # The first piece of a text gets a space of its own, so a text cannot be encoded in parts.
    cuts_before_spaces = False

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

    def _find_eod(self) -> int | None:
        for piece in ("<eod>", "<|endoftext|>"):
            number = self._model.piece_to_id(piece)
            if number != self._model.unk_id():
                return number
        return self._model.eos_id() if self._model.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text), dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)
