"""The index of GPT samples: which tokens make up sample i of a dataset, exactly as Megatron-LM orders them.

The documents of a split are laid end to end, shuffled, over as many epochs as the run needs; every L
tokens start a sample of L + 1. Three arrays say so: the document index, the sample index and the shuffle
index. They are pure functions of (sequence lengths, split, samples, L, seed). The formulas are Megatron's
`GPTDataset` (core/datasets/gpt_dataset.py and helpers.cpp), in closed form.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

from megatron_rgpt.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")
# A last epoch that is used for less than this share of its samples is shuffled on its own.
SEPARATE_BELOW = 0.80
# Documents handled at a time while the sample index is made: small enough for the processor's cache.
BLOCK_DOCUMENTS = 1 << 16


def split_bookends(split: str) -> tuple[tuple[float, float] | None, ...]:
    """`969,30,1` as three (low, high) shares of the sequences; None for a share of nothing.

    Raises:
        UserError: not one to three numbers, a negative one, or all zero.
    """
    words = [word for word in re.split(r"[\s,/]+", split.strip()) if word]
    try:
        parts = [float(word) for word in words]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 <= part < float("inf") for part in parts) or sum(parts) == 0:
        raise UserError(f"--split {split}: expected up to three shares for train, valid and test, as in 969,30,1")
    parts += [0.0] * (3 - len(parts))
    shares = (np.array(parts) / np.sum(np.array(parts))).tolist()
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share)
    return tuple((low, high) if high > low else None for low, high in itertools.pairwise(edges))


def split_range(bookends: tuple[float, float] | None, sequences: int) -> tuple[int, int]:
    """The sequences [first, end) of one split; halves are rounded to even, as Python's `round` does."""
    if bookends is None:
        return 0, 0
    return round(bookends[0] * float(sequences)), round(bookends[1] * float(sequences))


@dataclass(frozen=True)
class Epochs:
    """How often a split of `tokens` tokens is gone through for a run of samples of L + 1 tokens.

    `before` is the number of samples in the first count - 1 epochs, which are shuffled apart from the
    last one where `separate_last` holds.
    """

    tokens: int
    seq_length: int
    count: int
    separate_last: bool
    before: int

    @property
    def num_samples(self) -> int:
        """Samples in the index: what the whole epochs hold, at least what was asked for."""
        return (self.count * self.tokens - 1) // self.seq_length

    @property
    def first_safe_samples(self) -> int:
        """The smallest number of samples that leaves the order of all of them as it is."""
        if self.separate_last or self.count == 1:
            # What reaches into the last epoch at all: one token more than the epochs before it hold.
            return max(1, ((self.count - 1) * self.tokens - 1) // self.seq_length + 1)
        return max(self.before + 1, self.before + int(SEPARATE_BELOW * ((self.tokens - 1) // self.seq_length)))

    @property
    def last_safe_samples(self) -> int:
        """The largest number of samples that leaves the order of all of them as it is."""
        if not self.separate_last:
            return self.num_samples
        return self.before + int(SEPARATE_BELOW * ((self.tokens - 1) // self.seq_length)) - 1


def count_epochs(tokens: int, seq_length: int, samples: int | None) -> Epochs:
    """The epochs for `samples` samples (None: one epoch). `tokens` must be at least 1."""
    if samples is None:
        return Epochs(tokens, seq_length, 1, False, 0)
    count = max(1, -(-(samples * seq_length + 1) // tokens))
    before = ((count - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    separate = count > 1 and samples - before < int(SEPARATE_BELOW * per_epoch)
    return Epochs(tokens, seq_length, count, separate, before)


def document_index(first: int, end: int, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Sequence ids [epochs × (end - first)] in the order in which they are laid end to end."""
    dtype = np.int32 if end <= np.iinfo(np.int32).max else np.int64
    ids = np.arange(first, end, dtype=dtype)
    whole = epochs.count - epochs.separate_last
    index = np.tile(ids, epochs.count)
    random.shuffle(index[: whole * len(ids)])
    if epochs.separate_last:
        random.shuffle(index[whole * len(ids) :])
    return index


def sample_index(lengths: np.ndarray, documents: np.ndarray, epochs: Epochs) -> np.ndarray:
    """Where each sample starts: [samples + 1, 2], a row being (position in `documents`, token offset).

    Sample i starts at token p = i·L of the row of documents: the position is the last whose first token
    is at or before p. One pass over blocks of documents, so beyond the result it needs only a block.
    """
    seq_length, rows = epochs.seq_length, epochs.num_samples + 1
    total = epochs.count * epochs.tokens
    longest = int(lengths.max()) if len(lengths) else 0
    dtype = np.int32 if max(len(documents), longest) <= np.iinfo(np.int32).max else np.int64
    index = np.empty((rows, 2), dtype=dtype)
    row, base = 0, 0
    for start in range(0, len(documents), BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[documents[start : start + BLOCK_DOCUMENTS]], dtype=np.int64)
        stop = min(rows, -(-(base + int(ends[-1])) // seq_length))
        if stop > row:
            points = np.arange(row, stop, dtype=np.int64) * seq_length - base
            position = np.searchsorted(ends, points, side="right")
            begins = np.concatenate(([0], ends[:-1]))
            index[row:stop, 0] = position + start
            index[row:stop, 1] = points - begins[position]
            row = stop
        base += int(ends[-1])
    if base != total:
        raise ValueError(f"the documents hold {base} tokens, expected {total}")
    index[0] = 0  # a leading empty sequence: Megatron starts at it, not behind it
    return index


def shuffle_index(epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """The order [samples] in which the rows of the sample index are used."""
    samples = epochs.num_samples
    dtype = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(samples, dtype=dtype)
    border = epochs.before if epochs.separate_last else samples
    random.shuffle(index[:border])
    if border < samples:
        random.shuffle(index[border:])
    return index


def build_indices(lengths: np.ndarray, first: int, end: int, epochs: Epochs, seed: int) -> dict[str, np.ndarray]:
    """The three arrays of sequences [first, end). One generator serves both shuffles, in this order."""
    random = np.random.RandomState(seed)
    documents = document_index(first, end, epochs, random)
    return {
        "documents": documents,
        "samples": sample_index(lengths, documents, epochs),
        "shuffle": shuffle_index(epochs, random),
    }
