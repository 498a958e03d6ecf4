"""What every tokenizer offers, whichever library does the work."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back.

    `eod` is the id that ends a document, or None where the vocabulary has none. `fingerprint` is a
    hash of everything that decides the ids: two tokenizers with the same one tokenize alike.
    `cuts_before_spaces` promises that a text cut between a character that is no space and one space
    followed by another that is no space gives, in two parts, the ids of the whole.
    """

    name: str
    vocab_size: int
    eod: int | None
    fingerprint: str
    cuts_before_spaces: bool

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as an integer array [tokens]: no Python list of a long document."""
        ...

    def decode(self, ids: list[int]) -> str: ...
