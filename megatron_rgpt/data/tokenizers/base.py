"""What every tokenizer offers, whichever library does the work."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back.

    `eod` is the id that ends a document, or None where the vocabulary has none. `fingerprint` is a
    hash of everything that decides the ids: two tokenizers with the same one tokenize alike.
    `cuts_before_spaces` promises that a text may be cut before a single space between two printable ASCII
    characters: the ids of the first part by `encode_array` and those of each later part, which begins with
    that space, by `encode_continuation` are the ids of the whole.
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

    def encode_continuation(self, text: str) -> np.ndarray:
        """The ids of a later part of a text that was cut; only where `cuts_before_spaces` holds."""
        ...

    def decode(self, ids: list[int]) -> str: ...
