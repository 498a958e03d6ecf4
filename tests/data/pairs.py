"""Small pairs and flags for the data tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_rgpt.config.schema import DataConfig
from megatron_rgpt.data.indexed_writer import IndexedWriter


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> str:
    """A pair of one sequence a document; returns its prefix."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    return str(prefix)


def random_documents(seed: int, count: int, longest: int, *, vocab: int = 1000) -> list[np.ndarray]:
    """`count` documents of 0..longest random tokens, at least one token in all."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest + 1, count)
    lengths[-1] = max(lengths[-1], 1)
    return [random.integers(0, vocab, length) for length in lengths]


def data_flags(*data_path: str, cache: Path, **changes: object) -> DataConfig:
    """The data flags for --data-path, with the index cache in a folder of the test."""
    return DataConfig(data_path=tuple(data_path), data_cache_path=str(cache), **changes)
