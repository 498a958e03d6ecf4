"""Before training: do the token ids of a dataset fit the vocabulary?

Exact wherever that is cheap: by the type of the tokens, by the manifest, or by reading a file that is not
large. A large file without manifest is only probed here, and `sampler.batches` checks every batch it makes,
so an id that does not fit never reaches the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_rgpt.data.indexed import IndexedDataset, bin_path
from megatron_rgpt.data.manifest import read_manifest
from megatron_rgpt.data.samples import cached, file_identity
from megatron_rgpt.errors import UserError

READ_WHOLE_BYTES = 1 << 30
PROBES = 1024
PROBE_TOKENS = 4096


def check_vocabulary(
    indexed: IndexedDataset, vocab_size: int, cache_folder: Path | None, timeout_minutes: float
) -> None:
    """Raises UserError naming file, byte, id and --vocab-size where a token id is found that is too large.

    The result for a file that is read whole is kept in the cache, so that one process of each file system
    reads it once.
    """
    limits = np.iinfo(indexed.dtype)
    if indexed.num_tokens == 0 or (limits.max < vocab_size and limits.min == 0):
        return
    manifest = read_manifest(indexed.prefix)
    if manifest is not None and manifest.bin_bytes == indexed.num_tokens * indexed.dtype.itemsize:
        if manifest.max_id < vocab_size:
            return
        complain(indexed, _first_bad(indexed, vocab_size), vocab_size)
    if indexed.num_tokens * indexed.dtype.itemsize <= READ_WHOLE_BYTES:
        key: dict[str, object] = {"extremes of": file_identity(indexed.prefix)}
        what = f"the token ids of {indexed.prefix}"
        extremes = cached(cache_folder, key, lambda: {"ids": _extremes(indexed)}, timeout_minutes, what)["ids"]
        if extremes[0] < 0 or extremes[1] >= vocab_size:
            complain(indexed, _first_bad(indexed, vocab_size), vocab_size)
        return
    for start in np.linspace(0, indexed.num_tokens - PROBE_TOKENS, PROBES, dtype=np.int64).tolist():
        if (bad := find_bad(indexed.tokens[start : start + PROBE_TOKENS], vocab_size)) is not None:
            complain(indexed, start + bad, vocab_size)


def _blocks(indexed: IndexedDataset, size: int = 1 << 22) -> range:
    return range(0, indexed.num_tokens, size)


def _extremes(indexed: IndexedDataset) -> np.ndarray:
    blocks = _blocks(indexed)
    parts = (indexed.tokens[start : start + blocks.step] for start in blocks)
    pairs = np.array([(int(part.min()), int(part.max())) for part in parts], dtype=np.int64)
    return np.array([pairs[:, 0].min(), pairs[:, 1].max()])


def find_bad(block: np.ndarray, vocab_size: int) -> int | None:
    """The first place in a block of tokens whose id is not in the vocabulary."""
    if int(block.max()) < vocab_size and int(block.min()) >= 0:
        return None
    ids = block.astype(np.int64)
    return int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])


def _first_bad(indexed: IndexedDataset, vocab_size: int) -> int:
    blocks = _blocks(indexed)
    for start in blocks:
        if (bad := find_bad(indexed.tokens[start : start + blocks.step], vocab_size)) is not None:
            return start + bad
    raise UserError(f"{indexed.prefix}.manifest.json: max_id is not in the data: delete the manifest")


def complain(indexed: IndexedDataset, place: int, vocab_size: int) -> None:
    """Raises UserError for the token at `place`."""
    byte = place * indexed.dtype.itemsize
    sequence = int(np.searchsorted(indexed.sequence_pointers, byte, side="right")) - 1
    raise UserError(
        f"{bin_path(indexed.prefix)}: byte {byte} (sequence {sequence}): token id {int(indexed.tokens[place])} is not "
        f"in the vocabulary of {vocab_size}: check --vocab-size and --tokenizer-type against the data"
    )
