from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.sample_index import (
    build_indices,
    count_epochs,
    sample_index,
    split_bookends,
    split_range,
)
from megatron_rgpt.data.samples import GPTDataset
from megatron_rgpt.errors import UserError
from tests.data.pairs import random_documents, write_pair


def slow_samples(documents: list[np.ndarray], samples: int, seq_length: int, seed: int) -> list[np.ndarray]:
    """The order of `formats.md`, written as loops over tokens: what the fast code must equal."""
    tokens = sum(len(document) for document in documents)
    epochs = 1
    while epochs * tokens < samples * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and samples - before < int(0.80 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    order: list[int] = []
    for count in [epochs - 1, 1] if separate else [epochs]:
        ids = np.array(list(range(len(documents))) * count, dtype=np.int32)
        random.shuffle(ids)
        order += ids.tolist()
    stream = [token for number in order for token in documents[number]]
    rows = [stream[start : start + seq_length + 1] for start in range(0, len(stream) - seq_length, seq_length)]
    rows = [row for row in rows if len(row) == seq_length + 1]
    shuffle: list[int] = []
    for low, high in [(0, before), (before, len(rows))] if separate else [(0, len(rows))]:
        part = np.arange(low, high, dtype=np.uint32)
        random.shuffle(part)
        shuffle += part.tolist()
    return [np.array(rows[number]) for number in shuffle]


@pytest.mark.parametrize("seed", range(25))
def test_samples_equal_a_slow_reference(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    documents = random_documents(seed, int(random.integers(1, 30)), int(random.integers(1, 60)))
    tokens = sum(len(document) for document in documents)
    seq_length = int(random.integers(1, 40))
    samples = int(random.integers(1, 6 * max(1, tokens // seq_length) + 2))
    indexed = IndexedDataset(write_pair(tmp_path / "a", documents))
    dataset = GPTDataset(indexed, 0, len(indexed), samples=samples, seq_length=seq_length, seed=seed)
    expected = slow_samples(documents, samples, seq_length, seed)
    assert len(dataset) == len(expected) >= samples
    for i, sample in enumerate(expected):
        np.testing.assert_array_equal(dataset[i], sample)
        assert dataset[i].dtype == np.int64


def test_the_sample_index_is_the_same_in_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(0, 9, 1000).astype(np.int32)
    epochs = count_epochs(int(lengths.sum()), 7, None)
    documents = np.random.default_rng(1).permutation(1000).astype(np.int32)
    expected = sample_index(lengths, documents, epochs)
    monkeypatch.setattr("megatron_rgpt.data.sample_index.BLOCK_DOCUMENTS", 13)
    np.testing.assert_array_equal(sample_index(lengths, documents, epochs), expected)


def test_a_leading_empty_sequence_is_where_row_zero_starts() -> None:
    lengths = np.array([0, 5, 5], dtype=np.int32)
    rows = sample_index(lengths, np.arange(3, dtype=np.int32), count_epochs(10, 3, None))
    assert rows[0].tolist() == [0, 0]
    assert rows[1].tolist() == [1, 3]


def test_counts_beyond_32_bits_do_not_overflow() -> None:
    lengths = np.full(5, 2**31 - 1, dtype=np.int32)
    total = 5 * (2**31 - 1)
    epochs = count_epochs(total, 2**30, None)
    rows = sample_index(lengths, np.arange(5, dtype=np.int32), epochs)
    starts = [int(row) * (2**31 - 1) + int(offset) for row, offset in rows]
    assert starts == [i * 2**30 for i in range(epochs.num_samples + 1)]


def test_more_samples_than_the_epochs_hold_are_never_needed() -> None:
    for tokens in (1, 2, 17, 100):
        for samples in range(1, 60):
            epochs = count_epochs(tokens, 8, samples)
            assert epochs.num_samples >= samples
            assert (epochs.count - 1) * tokens < samples * 8 + 1


@pytest.mark.parametrize("tokens", [1, 5, 40, 103])
def test_the_safe_numbers_of_samples_are_exactly_the_borders(tokens: int) -> None:
    def order(samples: int) -> tuple[int, bool]:
        epochs = count_epochs(tokens, 4, samples)
        return (epochs.count, epochs.separate_last)

    for samples in range(1, 200):
        epochs = count_epochs(tokens, 4, samples)
        first, last = epochs.first_safe_samples, epochs.last_safe_samples
        assert first <= samples <= last
        assert order(first) == order(samples) == order(last) != order(last + 1)
        assert first == 1 or order(first - 1) != order(samples)


@pytest.mark.parametrize(
    ("split", "ranges"),
    [
        ("969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        ("100,0,0", [(0, 1000), (0, 0), (0, 0)]),
        ("99 1", [(0, 990), (990, 1000), (0, 0)]),
        ("0.5,0.0005,0.4995", [(0, 500), (500, 500), (500, 1000)]),
    ],
)
def test_a_split_cuts_the_sequences(split: str, ranges: list[tuple[int, int]]) -> None:
    assert [split_range(part, 1000) for part in split_bookends(split)] == ranges


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf,1"])
def test_a_split_that_is_none_is_refused(split: str) -> None:
    with pytest.raises(UserError, match="--split"):
        split_bookends(split)


def test_both_shuffles_share_one_generator() -> None:
    lengths = np.full(10, 7, dtype=np.int32)
    arrays = build_indices(lengths, 0, 10, count_epochs(70, 5, None), seed=3)
    random = np.random.RandomState(3)
    documents, shuffle = np.arange(10), np.arange(13)
    random.shuffle(documents)
    random.shuffle(shuffle)
    assert arrays["documents"].tolist() == documents.tolist()
    assert arrays["shuffle"].tolist() == shuffle.tolist()


def test_a_split_without_tokens_is_an_error(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_pair(tmp_path / "a", [[], [1]]))
    with pytest.raises(UserError, match="hold no tokens"):
        GPTDataset(indexed, 0, 1, samples=1, seq_length=4, seed=0)
