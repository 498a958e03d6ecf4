from __future__ import annotations

import threading

import numpy as np
import pytest

from megatron_rgpt.data.sampler import batches, micro_batch_ordinals
from megatron_rgpt.errors import UserError


class Counting:
    """Sample i is [i, i + 1, i + 2]."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + 3)

    def describe(self, index: int) -> str:
        return f"counting: {index}"


def run(dataset: Counting, consumed: int, micro_batch: int, dp_size: int, **more: int) -> list[int]:
    """The ordinals in the order in which the ranks consume them together."""
    ranks = [batches(dataset, consumed, micro_batch, rank, dp_size, **more) for rank in range(dp_size)]
    return [int(number) for step in zip(*ranks, strict=True) for ordinals, _ in step for number in ordinals]


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(1, 1), (4, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_ranks_together_take_every_sample_once_in_order(micro_batch: int, dp_size: int, prefetch: int) -> None:
    assert run(Counting(36), 12, micro_batch, dp_size, prefetch=prefetch) == list(range(12, 36))


def test_a_run_goes_on_at_another_size_where_it_stopped() -> None:
    first = run(Counting(16), 0, 2, 4)
    second = run(Counting(32), len(first), 4, 2)
    assert first + second == list(range(32))


def test_tokens_are_those_of_the_ordinals() -> None:
    for ordinals, tokens_BS in batches(Counting(8), 0, 2, 1, 2):
        np.testing.assert_array_equal(tokens_BS, ordinals[:, None] + np.arange(3))
        assert ordinals.dtype == tokens_BS.dtype == np.int64


def test_an_unfilled_chunk_ends_the_iteration() -> None:
    assert run(Counting(11), 0, 2, 2) == list(range(8))


def test_a_rank_takes_its_slice() -> None:
    assert micro_batch_ordinals(100, 4, 2, 8).tolist() == [108, 109, 110, 111]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_id_outside_the_vocabulary_names_sample_and_id(prefetch: int) -> None:
    reader = batches(Counting(20), 0, 1, 0, 1, vocab_size=10, prefetch=prefetch)
    taken = [int(next(reader)[0][0]) for _ in range(8)]
    assert taken == list(range(8))
    with pytest.raises(UserError, match=r"counting: 8: sample 8, token 2: id 10 .*--vocab-size"):
        next(reader)


def test_closing_the_iterator_ends_the_thread() -> None:
    reader = batches(Counting(1000), 0, 1, 0, 1)
    next(reader)
    thread = next(thread for thread in threading.enumerate() if thread.name == "data-prefetch")
    reader.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
