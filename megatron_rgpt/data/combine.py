"""Pairs out of other files: several merged into one, and an index for a raw file of tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rgpt.data.index_parts import IndexParts, naming_the_file
from megatron_rgpt.data.indexed import CODE_OF_DTYPE, IndexedDataset, idx_path
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.job import SKIPS_NAMED
from megatron_rgpt.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from megatron_rgpt.errors import UserError

BLOCK_TOKENS = 1 << 22


def merge(prefixes: Sequence[str], output_prefix: str, report: Callable[[str], None], *, overwrite: bool) -> None:
    """Append pairs in the order given; `report` is told each prefix as it is begun.

    Where all have manifests, the merged pair gets one too.

    Raises:
        UserError: types or tokenizers that differ, output in the way, a full disk.
    """
    if idx_path(output_prefix).exists() and not overwrite:
        raise UserError(f"--output-prefix {output_prefix}: {idx_path(output_prefix)} exists: pass --overwrite")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    for dataset in datasets:
        if dataset.dtype != datasets[0].dtype:
            raise UserError(
                f"{dataset.prefix} holds {dataset.dtype.name}, {prefixes[0]} {datasets[0].dtype.name}: "
                "tokenize them with one vocabulary"
            )
        if Path(dataset.prefix).resolve() == Path(output_prefix).resolve():
            raise UserError(f"--output-prefix {output_prefix} is one of the pairs to merge")
    manifests = [manifest for manifest in map(read_manifest, prefixes) if manifest is not None]
    for manifest in manifests:
        if manifest.tokenizer_fingerprint != manifests[0].tokenizer_fingerprint:
            raise UserError(
                f"the pairs were made with different tokenizers, {manifests[0].tokenizer!r} and {manifest.tokenizer!r}"
            )
    manifest_path(output_prefix).unlink(missing_ok=True)
    with IndexedWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            report(dataset.prefix)
            writer.add_dataset(dataset)
    if len(manifests) == len(prefixes):
        run_key = hashlib.sha256("".join(manifest.run_key for manifest in manifests).encode()).hexdigest()
        write_manifest(output_prefix, merge_manifests(manifests, writer.content_hash(), run_key))


def merge_manifests(manifests: Sequence[Manifest], content_hash: str, run_key: str) -> Manifest:
    """The manifest of pairs appended to each other: counts added up, the rest from the first."""
    skipped: Counter[str] = Counter()
    for manifest in manifests:
        skipped.update(manifest.skipped)
    examples = [line for manifest in manifests for line in manifest.skipped_examples]
    return replace(
        manifests[0],
        documents=sum(manifest.documents for manifest in manifests),
        tokens=sum(manifest.tokens for manifest in manifests),
        bin_bytes=sum(manifest.bin_bytes for manifest in manifests),
        max_id=max(manifest.max_id for manifest in manifests),
        content_hash=content_hash,
        run_key=run_key,
        skipped=dict(skipped),
        skipped_examples=examples[:SKIPS_NAMED],
    )


def wrap(file: Path, dtype_name: str, eod: int | None, *, overwrite: bool) -> IndexedDataset:
    """Write the index of a raw token file `NAME.bin`, which stays as it is.

    With an `eod` each document ends behind one, without it the file is one document.

    Raises:
        UserError: not a `.bin`, a size that is no whole number of tokens, an index in the way.
    """
    try:
        dtype = np.dtype(dtype_name)
    except TypeError:
        dtype = np.dtype(object)
    if file.suffix != ".bin":
        raise UserError(f"{file}: the name must end in .bin: rename or link it")
    if dtype not in CODE_OF_DTYPE:
        raise UserError(f"--dtype {dtype_name}: not a token type of the format, such as uint16 or int32")
    prefix = str(file.with_suffix(""))
    if idx_path(prefix).exists() and not overwrite:
        raise UserError(f"{idx_path(prefix)} exists: pass --overwrite to replace it")
    try:
        size = file.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise UserError(f"{file}: {size} bytes are no whole number of {dtype} tokens: check --dtype")
        tokens = np.memmap(file, mode="r", dtype=dtype).view(np.ndarray)
    except OSError as error:
        raise UserError(f"{file}: cannot read as {dtype} ({error}): check the file and --dtype") from None
    parts = IndexParts(prefix)
    with naming_the_file(idx_path(prefix)):
        try:
            open_tokens = 0
            for start in range(0, len(tokens), BLOCK_TOKENS):
                block = tokens[start : start + BLOCK_TOKENS]
                ends = np.flatnonzero(block == eod) + 1 if eod is not None else np.empty(0, dtype=np.int64)
                _add_documents(parts, np.diff(ends, prepend=-open_tokens))
                open_tokens = len(block) - int(ends[-1]) if len(ends) else open_tokens + len(block)
            if open_tokens:
                _add_documents(parts, np.array([open_tokens]))
            parts.assemble(dtype).replace(idx_path(prefix))
        finally:
            parts.close()
            for path in (parts.lengths_path, parts.marks_path, parts.path):
                path.unlink(missing_ok=True)
    return IndexedDataset(prefix)


def _add_documents(parts: IndexParts, lengths: np.ndarray) -> None:
    first = parts.sequences
    parts.add_sequences(lengths)
    parts.end_documents(np.arange(first + 1, first + len(lengths) + 1))
