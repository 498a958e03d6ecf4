"""GPT samples of one indexed dataset: sample i as an array of L + 1 tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_rgpt.data.index_cache import Key, load_or_build
from megatron_rgpt.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_rgpt.data.sample_index import Epochs, build_indices, count_epochs
from megatron_rgpt.errors import UserError

# Part of every cache key: raise it when the arrays come out differently.
INDEX_FORMAT = 1


class GPTDataset:
    """Samples of L + 1 tokens from the sequences [first, end) of an indexed dataset, in training order.

    `dataset[i]` is an int64 array [seq_length + 1]: input `[:-1]`, labels `[1:]`. It has at least
    `samples` samples (None: those of one epoch), up to what the whole epochs hold. With a `cache_folder`
    the index is built once per file system and memory-mapped, else in memory.

    Raises:
        UserError: the sequences hold no token, or the cache cannot be written or waited for.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first: int,
        end: int,
        *,
        samples: int | None,
        seq_length: int,
        seed: int,
        cache_folder: Path | None = None,
        timeout_minutes: float = 10.0,
        name: str = "samples",
    ) -> None:
        self.indexed = indexed
        self.seq_length = seq_length
        self.first, self.end = first, end

        def build() -> dict[str, np.ndarray]:
            lengths = indexed.sequence_lengths
            tokens = int(lengths[first:end].sum(dtype=np.int64))
            if tokens == 0:
                raise UserError(
                    f"{indexed.prefix}: sequences {first}..{end} ({name}) hold no tokens: change --split or the data"
                )
            epochs = count_epochs(tokens, seq_length, samples)
            if epochs.num_samples == 0:
                raise UserError(
                    f"{indexed.prefix}: {name} holds {tokens} tokens, fewer than one sample of "
                    f"--seq-length {seq_length} + 1"
                )
            shape = [tokens, epochs.count, int(epochs.separate_last), epochs.before]
            arrays = build_indices(lengths, first, end, epochs, seed)
            return {"epochs": np.array(shape, dtype=np.int64), **arrays}

        key: Key = {
            "format": INDEX_FORMAT,
            "data": file_identity(indexed.prefix),
            "range": [first, end],
            "samples": samples,
            "seq_length": seq_length,
            "seed": seed,
        }
        arrays = cached(cache_folder, key, build, timeout_minutes, f"{indexed.prefix} ({name})")
        tokens, count, separate, before = arrays["epochs"].tolist()
        self.epochs = Epochs(tokens, seq_length, count, bool(separate), before)
        self.documents, self.sample_rows, self.shuffle = arrays["documents"], arrays["samples"], arrays["shuffle"]

    def __len__(self) -> int:
        return len(self.shuffle)

    def __getitem__(self, index: int) -> np.ndarray:
        row = self.shuffle[index]
        (document, offset), (last_document, last_offset) = self.sample_rows[row : row + 2].tolist()
        indexed, size = self.indexed, self.seq_length + 1
        tokens, itemsize = indexed.tokens, indexed.dtype.itemsize
        if document == last_document:
            begin = int(indexed.sequence_pointers[self.documents[document]]) // itemsize + offset
            return tokens[begin : begin + size].astype(np.int64)
        sample = np.empty(size, dtype=np.int64)
        filled = 0
        sequences = self.documents[document : last_document + 1]
        begins = (indexed.sequence_pointers[sequences] // itemsize).tolist()
        lengths = indexed.sequence_lengths[sequences].tolist()
        lengths[-1] = last_offset + 1
        for begin, length in zip(begins, lengths, strict=True):
            part = tokens[begin + offset : begin + length]
            sample[filled : filled + len(part)] = part
            filled += len(part)
            offset = 0
        return sample

    def describe(self, index: int) -> str:
        """Where sample `index` starts in the files, for messages."""
        row = self.shuffle[index]
        document, offset = self.sample_rows[row].tolist()
        sequence = int(self.documents[document])
        byte = int(self.indexed.sequence_pointers[sequence]) + offset * self.indexed.dtype.itemsize
        return f"{bin_path(self.indexed.prefix)}: sequence {sequence}, byte {byte}"


def cached(
    folder: Path | None, key: Key, build: Callable[[], dict[str, np.ndarray]], timeout_minutes: float, what: str
) -> dict[str, np.ndarray]:
    """`load_or_build`, or only build where no cache is wanted."""
    if folder is None:
        return build()
    return load_or_build(folder, key, build, timeout_minutes=timeout_minutes, what=what)


def file_identity(prefix: str) -> list[object]:
    """What tells rewritten data from the data an index was made for: path, sizes and times of both files."""
    pair = [path.stat() for path in (idx_path(prefix), bin_path(prefix))]
    return [os.path.realpath(prefix), *([status.st_size, status.st_mtime_ns] for status in pair)]
