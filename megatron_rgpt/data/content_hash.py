"""A hash of a long file that can be taken up again after a kill.

`hashlib` objects cannot be saved, so the file is hashed in blocks, and the block digests are chained:
chain' = sha256(chain + sha256(block)). A saved position is the chain alone; resuming reads again at most
one block.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK_BYTES = 16 << 20
EMPTY_CHAIN = bytes(32)


class BlockHash:
    """Running hash of a byte stream. `chain` covers the whole blocks so far, `bytes_seen` everything."""

    def __init__(self) -> None:
        self.chain = EMPTY_CHAIN
        self.bytes_seen = 0
        self._block = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            room = BLOCK_BYTES - self.bytes_seen % BLOCK_BYTES
            part, view = view[:room], view[room:]
            self._block.update(part)
            self.bytes_seen += len(part)
            if self.bytes_seen % BLOCK_BYTES == 0:
                self.chain = hashlib.sha256(self.chain + self._block.digest()).digest()
                self._block = hashlib.sha256()

    def hexdigest(self) -> str:
        """The hash of everything seen; the stream may go on."""
        tail = self._block.digest() if self.bytes_seen % BLOCK_BYTES else b""
        return hashlib.sha256(self.chain + tail + self.bytes_seen.to_bytes(8, "little")).hexdigest()

    @classmethod
    def resume(cls, path: Path, chain: bytes, bytes_seen: int) -> BlockHash:
        """The state after `bytes_seen` bytes of `path`, given the chain over its whole blocks."""
        state = cls()
        state.chain = chain
        state.bytes_seen = bytes_seen - bytes_seen % BLOCK_BYTES
        with open(path, "rb") as file:
            file.seek(state.bytes_seen)
            tail = file.read(bytes_seen - state.bytes_seen)
        state.update(tail)
        return state


def hash_file(path: Path) -> str:
    """The block hash of a whole file, as a hex string."""
    state = BlockHash()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            state.update(data)
    return state.hexdigest()
