"""Which samples a rank takes, and their batches in order.

Position is one number, the samples consumed so far: it is walked upward in chunks of micro-batch × data
parallel size, and rank r takes the r-th slice of each chunk. Nothing else decides the order, so a run goes
on at another data parallel size where it stopped. A sample's ordinal is its number in the run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from megatron_rgpt.errors import UserError

Batch = tuple[np.ndarray, np.ndarray]


class SampleSource(Protocol):
    """What `batches` reads: samples of equal length by number, and their place for messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...

    def describe(self, index: int) -> str: ...


def micro_batch_ordinals(consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Ordinals [micro_batch_size] of rank `dp_rank`'s micro-batch when `consumed_samples` are behind all ranks."""
    first = consumed_samples + dp_rank * micro_batch_size
    return np.arange(first, first + micro_batch_size, dtype=np.int64)


def batches(
    dataset: SampleSource,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    vocab_size: int | None = None,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """This rank's micro-batches from `consumed_samples` on: (ordinals [b], tokens [b, S + 1]), both int64.

    Ends before the first chunk that the dataset does not fill. One background thread keeps up to
    `prefetch` micro-batches ready (0: none); the order is the same.

    Raises:
        UserError: a token id is not below `vocab_size`; names the file, the sample and the id.
    """
    source = _fetch(dataset, consumed_samples, micro_batch_size, dp_rank, dp_size, vocab_size)
    return _prefetched(source, prefetch) if prefetch else source


def _fetch(
    dataset: SampleSource,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    vocab_size: int | None,
) -> Iterator[Batch]:
    chunk = micro_batch_size * dp_size
    for consumed in range(consumed_samples, len(dataset) - chunk + 1, chunk):
        ordinals = micro_batch_ordinals(consumed, micro_batch_size, dp_rank, dp_size)
        tokens_BS = np.stack([dataset[int(ordinal)] for ordinal in ordinals])
        if vocab_size is not None:
            _check_ids(dataset, ordinals, tokens_BS, vocab_size)
        yield ordinals, tokens_BS


def _check_ids(dataset: SampleSource, ordinals: np.ndarray, tokens_BS: np.ndarray, vocab_size: int) -> None:
    if tokens_BS.max() < vocab_size and tokens_BS.min() >= 0:
        return
    bad_BS = (tokens_BS >= vocab_size) | (tokens_BS < 0)
    row, column = np.argwhere(bad_BS)[0].tolist()
    ordinal = int(ordinals[row])
    raise UserError(
        f"{dataset.describe(ordinal)}: sample {ordinal}, token {column}: id {int(tokens_BS[row, column])} is not in "
        f"the vocabulary of {vocab_size}: check --vocab-size and --tokenizer-type against the data"
    )


def _prefetched(source: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """The same batches, made ahead in one thread. An error arrives at its batch's turn."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.2)  # looks up now and then whether anybody still reads
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in source:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # handed to the reader, whatever it is
            put(error)

    threading.Thread(target=work, name="data-prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
