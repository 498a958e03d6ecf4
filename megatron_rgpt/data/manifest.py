"""The manifest beside a pair, `PREFIX.manifest.json`: what it was made from, and what it holds."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_rgpt.data.index_parts import naming_the_file
from megatron_rgpt.data.tokenizers.base import Tokenizer
from megatron_rgpt.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Counts of one pair. `max_id` is its largest token id, `content_hash` the block hash of its `.bin`.

    `skipped` counts left-out documents by reason, `skipped_examples` names the first of them; `run_key`
    is a hash of the inputs and flags that made it.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    dtype: str
    documents: int
    tokens: int
    bin_bytes: int
    max_id: int
    content_hash: str
    run_key: str
    input_bytes: int
    inputs: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: list[str] = field(default_factory=list)
    format: int = FORMAT


def manifest_path(prefix: str) -> Path:
    return Path(f"{prefix}.manifest.json")


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write durably under a temporary name, then rename."""
    temporary = path.with_name(f"{path.name}.part")
    with naming_the_file(path):
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_manifest(prefix: str, manifest: Manifest) -> None:
    write_json(manifest_path(prefix), asdict(manifest))


def read_manifest(prefix: str) -> Manifest | None:
    """The manifest of a pair; None where it has none, as a pair made elsewhere.

    Raises:
        UserError: it is there but cannot be read.
    """
    path = manifest_path(prefix)
    try:
        content = json.loads(path.read_text("utf-8"))
        if content.get("format") != FORMAT:
            raise ValueError(f"format {content.get('format')}, expected {FORMAT}")
        return Manifest(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged manifest ({error}): delete it, or make the data again") from None


def check_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Raises UserError where the manifest says that another tokenizer made the data."""
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{manifest_path(prefix)}: the data was made with tokenizer {manifest.tokenizer!r} "
            f"(vocabulary {manifest.vocab_size}), the run has {tokenizer.name!r} ({tokenizer.vocab_size}): "
            "change --tokenizer-type or its files, or tokenize again"
        )
