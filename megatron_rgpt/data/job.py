"""What a preprocessing run is to make, and how far it has come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from megatron_rgpt.data.chunks import Chunk, Position
from megatron_rgpt.data.encode import Skip
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.inputs import InputFile, absolute
from megatron_rgpt.data.tokenizers.base import Tokenizer
from megatron_rgpt.errors import UserError

SKIPS_NAMED = 100


@dataclass(frozen=True)
class Job:
    """What to make of what. The pairs are named `OUTPUT_PREFIX_KEY_document` after each of `keys`.

    `start` and `end` (None: the end of all files) cut out the part that a partition makes.
    """

    files: Sequence[InputFile]
    output_prefix: str
    tokenizer: Tokenizer
    keys: Sequence[str] = ("text",)
    append_eod: bool = False
    workers: int = 1
    stop_on_error: bool = True
    overwrite: bool = False
    start: Position = Position()
    end: Position | None = None

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eod is None:
            raise UserError(f"--append-eod: tokenizer {self.tokenizer.name} has no end-of-document token")
        if len(set(self.keys)) != len(self.keys) or not self.keys:
            raise UserError(f"--json-keys {' '.join(self.keys)}: give each key once")
        text = next((file.path for file in self.files if file.format == "text"), None)
        if text is not None and len(self.keys) > 1:
            raise UserError(f"--json-keys {' '.join(self.keys)}: {text} is text, which has no keys: give JSONL alone")

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{key}_document" for key in self.keys]

    @property
    def run_key(self) -> str:
        """A hash of all that decides the output: inputs, tokenizer, keys; not workers, not --on-error."""
        content = [
            absolute(self.files),
            [file.format for file in self.files],
            self.tokenizer.fingerprint,
            self.tokenizer.vocab_size,
            list(self.keys),
            self.append_eod,
            [asdict(self.start), asdict(self.end) if self.end else None],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Progress:
    """Where a run stands. Bytes are those of the input files on disk, `log_bytes` those of the skip log."""

    position: Position = Position()
    input_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: list[str] = field(default_factory=list)
    log_bytes: int = 0

    def add(self, chunk: Chunk, skips: Sequence[Skip], writers: Sequence[IndexedWriter]) -> None:
        self.position = chunk.end
        self.input_bytes += chunk.disk_bytes
        self.documents = writers[0].num_documents
        self.tokens = sum(writer.num_tokens for writer in writers)
        for skip in skips:
            # The reason's first words: what follows a colon is about the one document.
            reason = skip.reason.split(":")[0].split(" at byte")[0]
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            if len(self.skipped_examples) < SKIPS_NAMED:
                self.skipped_examples.append(f"{skip.where}: {skip.reason}")
