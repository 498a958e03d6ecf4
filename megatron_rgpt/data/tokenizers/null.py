"""Text that is already token ids: numbers separated by spaces (Megatron's NullTokenizer)."""

from __future__ import annotations

import numpy as np

from megatron_rgpt.errors import UserError


class NullTokenizer:
    """Ids 0..vocab_size-1 as written; like Megatron's, `eod` is one id more."""

    name = "null"
    cuts_before_spaces = True
    # Numbers are numbers in every vocabulary.
    fingerprint = "null"

    def __init__(self, vocab_size: int) -> None:
        self.eod: int | None = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise UserError(f"--tokenizer-type null expects token ids separated by spaces: {error}") from None
        if any(not 0 <= number < self.vocab_size for number in ids):
            raise UserError(f"--tokenizer-type null: an id outside 0..{self.vocab_size - 1}: check --vocab-size")
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int64)

    def encode_continuation(self, text: str) -> np.ndarray:
        return self.encode_array(text)

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
