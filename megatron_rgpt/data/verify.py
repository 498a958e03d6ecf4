"""Is a pair what it claims to be? Every length, pointer and mark, every token id, and the hash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_rgpt.data.content_hash import BlockHash
from megatron_rgpt.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_rgpt.data.manifest import manifest_path, read_manifest
from megatron_rgpt.data.vocabulary_check import complain, find_bad
from megatron_rgpt.errors import UserError

BLOCK = 1 << 20


def verify(prefix: str, vocab_size: int | None, report: Callable[[int, int], None]) -> list[str]:
    """Check a pair from end to end, a block at a time; returns what was checked, a line each.

    `vocab_size` defaults to the manifest's. `report` is told the tokens read and their total.

    Raises:
        UserError: the first thing found wrong.
    """
    dataset = IndexedDataset(prefix)  # sizes of both files
    _check_index(dataset)
    lines = [f"structure: {len(dataset):,} sequences, {dataset.num_documents:,} documents, back to back"]
    manifest = read_manifest(prefix)
    if vocab_size is None and manifest is not None:
        vocab_size = manifest.vocab_size
    content = BlockHash()
    largest = -1
    for start in range(0, dataset.num_tokens, BLOCK):
        block = dataset.tokens[start : start + BLOCK]
        content.update(np.ascontiguousarray(block).data)
        largest = max(largest, int(block.max()))
        if vocab_size is not None and (bad := find_bad(block, vocab_size)) is not None:
            complain(dataset, start + bad, vocab_size)
        report(min(start + BLOCK, dataset.num_tokens), dataset.num_tokens)
    known = f"below {vocab_size:,}" if vocab_size is not None else "no vocabulary size to hold them to (--vocab-size)"
    lines.append(f"token ids: {dataset.num_tokens:,}, largest {largest}: {known}")
    if manifest is None:
        return [*lines, "no manifest: no hash to hold the tokens to"]
    for name, wanted, found in (
        ("tokens", manifest.tokens, dataset.num_tokens),
        ("documents", manifest.documents, dataset.num_documents),
        ("largest id", manifest.max_id, largest),
        ("hash", manifest.content_hash, content.hexdigest()),
    ):
        if wanted != found:
            raise UserError(
                f"{manifest_path(prefix)}: {name} {wanted}, but {bin_path(prefix)} has {found}: make or copy it again"
            )
    return [*lines, f"manifest: counts and hash {manifest.content_hash[:16]}… agree"]


def _check_index(dataset: IndexedDataset) -> None:
    path = idx_path(dataset.prefix)
    expected = 0
    for start in range(0, len(dataset), BLOCK):
        lengths = dataset.sequence_lengths[start : start + BLOCK].astype(np.int64)
        pointers = dataset.sequence_pointers[start : start + BLOCK]
        if (lengths < 0).any():
            raise UserError(f"{path}: sequence {start + int((lengths < 0).argmax())} has a negative length")
        ends = expected + np.cumsum(lengths) * dataset.dtype.itemsize
        begins = ends - lengths * dataset.dtype.itemsize
        if (wrong := begins != pointers).any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path}: sequence {start + at} is said to start at byte {int(pointers[at])}, but the ones before it "
                f"end at byte {int(begins[at])}"
            )
        expected = int(ends[-1])
    last = 0
    for start in range(0, dataset.num_documents + 1, BLOCK):
        marks = dataset.document_indices[start : start + BLOCK]
        steps = np.diff(marks, prepend=last)
        if (steps < 0).any() or (start == 0 and len(marks) and int(marks[0]) != 0):
            raise UserError(f"{path}: document marks are not in order at document {start + int((steps < 0).argmax())}")
        last = int(marks[-1]) if len(marks) else last
