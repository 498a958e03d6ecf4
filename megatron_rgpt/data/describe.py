"""What a pair holds: its counts, the lengths of its documents, its splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rgpt.data.indexed import IndexedDataset, bin_path
from megatron_rgpt.data.manifest import read_manifest
from megatron_rgpt.data.sample_index import SPLIT_NAMES, split_bookends, split_range
from megatron_rgpt.errors import UserError

BAR = 40


@dataclass(frozen=True)
class LengthHistogram:
    """Sequences by length: `counts[i]` have `edges[i]` up to but not `edges[i + 1]` tokens."""

    edges: list[int]
    counts: list[int]


def length_histogram(lengths: np.ndarray) -> LengthHistogram:
    """Buckets 0, 1, 2-3, 4-7, ... doubling up to the longest."""
    longest = int(lengths.max()) if len(lengths) else 0
    edges = [0, *(1 << bit for bit in range(longest.bit_length() + 1))]
    counts = np.histogram(lengths, bins=edges)[0]
    return LengthHistogram(edges, counts.tolist())


def info_lines(dataset: IndexedDataset, split: str) -> list[str]:
    """The report of `data.py info`."""
    lengths = dataset.sequence_lengths
    size = dataset.num_tokens * dataset.dtype.itemsize
    lines = [
        f"{bin_path(dataset.prefix)}: {size:,} bytes, {dataset.dtype.name}",
        f"tokens {dataset.num_tokens:,}  documents {dataset.num_documents:,}  sequences {len(dataset):,}",
    ]
    if len(dataset):
        quarters = np.percentile(lengths, [0, 25, 50, 75, 100]).astype(int).tolist()
        lines.append(
            "sequence length min {:,}  quartiles {:,} {:,} {:,}  max {:,}".format(*quarters)
            + f"  mean {dataset.num_tokens / len(dataset):,.1f}"
        )
    lines += _histogram_lines(length_histogram(lengths))
    lines.append(f"--split {split}:")
    for name, bookends in zip(SPLIT_NAMES, split_bookends(split), strict=True):
        first, end = split_range(bookends, len(dataset))
        tokens = int(lengths[first:end].sum(dtype=np.int64))
        lines.append(f"  {name:5}  sequences {first:,} to {end:,}: {end - first:,}, {tokens:,} tokens")
    return lines + _manifest_lines(dataset.prefix)


def _histogram_lines(histogram: LengthHistogram) -> list[str]:
    most = max(histogram.counts, default=0)
    lines = []
    for low, high, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        if count:
            label = f"{low:,}" if high == low + 1 else f"{low:,}-{high - 1:,}"
            lines.append(f"  {label:>23} {count:>13,} {'#' * max(1, BAR * count // most)}")
    return lines


def _manifest_lines(prefix: str) -> list[str]:
    manifest = read_manifest(prefix)
    if manifest is None:
        return ["no manifest: the tokenizer is not known"]
    end = f"ends in {manifest.eod}" if manifest.append_eod else "without end tokens"
    lines = [f"tokenizer {manifest.tokenizer}, vocabulary {manifest.vocab_size:,}, largest id {manifest.max_id}, {end}"]
    return lines + [f"  left out {count:,}: {reason}" for reason, count in manifest.skipped.items()]


def document_ids(dataset: IndexedDataset, number: int) -> np.ndarray:
    """The token ids [tokens], int64, of a document: all its sequences in a row. Raises UserError outside."""
    if not 0 <= number < dataset.num_documents:
        raise UserError(f"--document {number}: {dataset.prefix} has documents 0 to {dataset.num_documents - 1}")
    first, end = dataset.document_indices[number : number + 2].tolist()
    parts = [dataset[sequence].astype(np.int64) for sequence in range(first, end)]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
