"""The writing end of preprocessing: results in order into the pairs, documents in pieces put together."""

from __future__ import annotations

from megatron_rgpt.data.chunks import Chunk, Piece, PieceEnd, Trouble
from megatron_rgpt.data.encode import EMPTY, Encoded, Encoder, Skip
from megatron_rgpt.data.index_parts import MAX_SEQUENCE_TOKENS
from megatron_rgpt.data.indexed_writer import IndexedWriter, WriterState
from megatron_rgpt.data.skip_log import SkipLog


class Output:
    """Writes the workers' results, puts documents that come in pieces together, and logs what is left out."""

    def __init__(self, writers: list[IndexedWriter], encoder: Encoder, log: SkipLog) -> None:
        self.writers = writers
        self._log = log
        self._end = encoder.end
        self._open: list[int] | None = None  # tokens so far under each key of the document in pieces
        self._failure: Skip | None = None

    @property
    def between_documents(self) -> bool:
        return self._open is None

    def take(self, chunk: Chunk, encoded: Encoded) -> list[Skip]:
        """Write a result; returns the documents left out."""
        skips = self._write(chunk, encoded)
        self._log.add(skips)
        return skips

    def sync(self) -> tuple[list[WriterState], int]:
        """Make all durable; returns the writers' states and the size of the log."""
        return [writer.mark(durable=True) for writer in self.writers], self._log.sync()

    def close(self) -> None:
        """Close the files and leave them for a resume."""
        for writer in self.writers:
            writer.close()
        self._log.close()

    def _write(self, chunk: Chunk, encoded: Encoded) -> list[Skip]:
        work = chunk.work
        if isinstance(work, Piece):
            self._piece(work, encoded)
            return []
        if self._open is not None and isinstance(work, PieceEnd | Trouble):
            return self._close(work.where, encoded.skips)
        if not isinstance(work, PieceEnd):
            for writer, tokens, lengths in zip(self.writers, encoded.tokens, encoded.lengths, strict=True):
                writer.add_documents(tokens, lengths)
        return encoded.skips

    def _piece(self, work: Piece, encoded: Encoded) -> None:
        if self._open is None:
            self._open = [0] * len(self.writers)
            self._failure = None
            for writer in self.writers:
                writer.mark(durable=False)
        if encoded.skips and self._failure is None:
            self._failure = encoded.skips[0]
        if self._failure is None:
            self.writers[work.key].append(encoded.tokens[0])
            self._open[work.key] += len(encoded.tokens[0])

    def _close(self, where: str, skips: list[Skip]) -> list[Skip]:
        failure = self._failure or (skips[0] if skips else None)
        if failure is None and not all(self._open or []):
            failure = Skip(where, EMPTY)
        if failure is None and max(self._open or []) + len(self._end) > MAX_SEQUENCE_TOKENS:
            failure = Skip(where, f"more tokens than the format holds in a sequence: {max(self._open or [])}")
        for writer in self.writers:
            if failure is not None:
                writer.rollback()
                continue
            writer.append(self._end)
            writer.end_sequence()
            writer.end_document()
        self._open = None
        return [failure] if failure is not None else []
