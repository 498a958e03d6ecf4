"""The byte tokenizer: ids 0..255 are the bytes of UTF-8, 256 ends a document."""

from __future__ import annotations

import numpy as np


class ByteTokenizer:
    name = "byte"
    vocab_size = 257
    eod: int | None = 256
    fingerprint = "byte-utf8-eod256"
    cuts_before_spaces = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_continuation(self, text: str) -> np.ndarray:
        return self.encode_array(text)

    def decode(self, ids: list[int]) -> str:
        """Ids above 255 print as the end-of-document mark; broken UTF-8 as replacement characters."""
        parts: list[str] = []
        run = bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
                continue
            parts.append(run.decode("utf-8", errors="replace"))
            parts.append("<|endoftext|>")
            run.clear()
        return "".join([*parts, run.decode("utf-8", errors="replace")])
