"""The door for training: from the data flags to the train, validation and test samples.

Every rank calls it on its own; the only thing ranks share is the index cache on their file system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_rgpt.data.blend import BlendedDataset, blend_choices, normalised, occurrence
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.manifest import check_tokenizer, manifest_path
from megatron_rgpt.data.sample_index import SPLIT_NAMES, split_bookends, split_range
from megatron_rgpt.data.samples import GPTDataset, cached
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.data.vocabulary_check import check_vocabulary
from megatron_rgpt.errors import UserError

Dataset = GPTDataset | BlendedDataset
CACHE_FOLDER_NAME = "index_cache"


class DataFlags(Protocol):
    """The data flags read here. Paths are one prefix, or weight prefix weight prefix …; empty for none."""

    data_path: Sequence[str]
    train_data_path: Sequence[str]
    valid_data_path: Sequence[str]
    test_data_path: Sequence[str]
    split: str
    data_cache_path: str | None
    data_index_timeout_minutes: float
    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None
    tokenizer_model: str | None
    vocab_size: int | None


@dataclass(frozen=True)
class Source:
    """One split's prefixes and shares, and the part of each prefix's sequences it takes."""

    flag: str
    name: str
    prefixes: tuple[str, ...]
    shares: np.ndarray
    bookends: tuple[float, float] | None


def parse_paths(flag: str, words: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """`A`, or `0.7 A 0.3 B`, as (prefixes, shares).

    Raises:
        UserError: several prefixes without weights, or weights that are no shares.
    """
    if len(words) == 1:
        return (words[0],), np.ones(1)
    weights, prefixes = [], []
    for weight, prefix in zip(words[::2], words[1::2], strict=False):
        try:
            weights.append(float(weight))
        except ValueError:
            raise UserError(
                f"{flag}: expected a weight before each prefix, as in 0.7 A 0.3 B; got {weight!r}"
            ) from None
        prefixes.append(prefix)
    if len(words) % 2:
        raise UserError(f"{flag}: {words[-1]!r} stands alone: expected weight prefix weight prefix …")
    return tuple(prefixes), normalised(weights, prefixes)


def split_sources(flags: DataFlags) -> tuple[Source | None, Source | None, Source | None]:
    """Where each split's samples come from; None for a split without paths."""
    own = (flags.train_data_path, flags.valid_data_path, flags.test_data_path)
    if flags.data_path and any(own):
        raise UserError("--data-path and --train-data-path/--valid-data-path/--test-data-path exclude each other")
    if flags.data_path:
        prefixes, shares = parse_paths("--data-path", flags.data_path)
        bookends = split_bookends(flags.split)
        train, valid, test = (
            Source("--split", name, prefixes, shares, part) for name, part in zip(SPLIT_NAMES, bookends, strict=True)
        )
        return train, valid, test
    if not any(own):
        raise UserError(
            "--data-path is missing: give the prefix of a .bin/.idx pair (tools/preprocess_data.py makes one)"
        )
    train, valid, test = (
        Source(f"--{name}-data-path", name, *parse_paths(f"--{name}-data-path", words), (0.0, 1.0)) if words else None
        for name, words in zip(SPLIT_NAMES, own, strict=True)
    )
    return train, valid, test


def build_datasets(
    flags: DataFlags,
    *,
    seq_length: int,
    seed: int,
    samples: tuple[int, int, int],
    vocab_size: int | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The train, validation and test samples, each at least as many as asked for; None where none are.

    Where a pair has a manifest, the run's tokenizer must be the one that made it. With a `vocab_size` the
    token ids are checked against it first (`vocabulary_check`).

    Raises:
        UserError: a bad path, weight, split or file; an empty split that is asked for; another tokenizer;
            ids too large.
    """
    built: list[Dataset | None] = []
    opened: dict[str, IndexedDataset] = {}
    for name, source, wanted in zip(SPLIT_NAMES, split_sources(flags), samples, strict=True):
        if wanted == 0:
            built.append(None)
            continue
        if source is None:
            raise UserError(f"--{name}-data-path is missing, and the run needs {wanted} {name} samples")
        if source.bookends is None:
            raise UserError(f"--split {flags.split}: the {name} share is 0, and the run needs {wanted} {name} samples")
        built.append(build_split(source, flags, opened, seq_length=seq_length, seed=seed, samples=wanted))
    _check_tokenizer(flags, list(opened))
    if vocab_size is not None:
        for prefix, indexed in opened.items():
            check_vocabulary(indexed, vocab_size, cache_folder(flags, prefix), flags.data_index_timeout_minutes)
    train, valid, test = built
    return train, valid, test


def _check_tokenizer(flags: DataFlags, prefixes: Sequence[str]) -> None:
    with_manifest = [prefix for prefix in prefixes if manifest_path(prefix).exists()]
    if with_manifest:
        tokenizer = build_tokenizer(
            flags.tokenizer_type,
            vocab_file=flags.vocab_file,
            merge_file=flags.merge_file,
            tokenizer_model=flags.tokenizer_model,
            vocab_size=flags.vocab_size,
        )
        for prefix in with_manifest:
            check_tokenizer(prefix, tokenizer)


def build_split(
    source: Source,
    flags: DataFlags,
    opened: dict[str, IndexedDataset],
    *,
    seq_length: int,
    seed: int,
    samples: int,
) -> Dataset:
    """One split: the counts of the blend first, then each dataset at exactly its count."""

    def dataset(prefix: str, count: int) -> GPTDataset:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix)
        first, end = split_range(source.bookends, len(opened[prefix]))
        if first == end:
            share = f"--split {flags.split}" if source.flag == "--split" else source.flag
            raise UserError(
                f"{share}: the {source.name} part of {prefix} ({len(opened[prefix])} sequences) is empty, "
                f"and the run needs {count} samples of it"
            )
        return GPTDataset(
            opened[prefix],
            first,
            end,
            samples=count,
            seq_length=seq_length,
            seed=seed,
            cache_folder=cache_folder(flags, prefix),
            timeout_minutes=flags.data_index_timeout_minutes,
            name=source.name,
        )

    if len(source.prefixes) == 1:
        return dataset(source.prefixes[0], samples)

    def blend() -> dict[str, np.ndarray]:
        choices = blend_choices(source.shares, samples)
        return {"choices": choices, "within": occurrence(choices)}

    key: dict[str, object] = {"blend of": [share.hex() for share in source.shares.tolist()], "samples": samples}
    folder = cache_folder(flags, source.prefixes[0])
    arrays = cached(folder, key, blend, flags.data_index_timeout_minutes, f"the {source.name} blend")
    counts = np.bincount(arrays["choices"], minlength=len(source.prefixes)).tolist()
    parts = [dataset(prefix, count) if count else None for prefix, count in zip(source.prefixes, counts, strict=True)]
    return BlendedDataset(parts, arrays["choices"], arrays["within"])


def cache_folder(flags: DataFlags, prefix: str) -> Path:
    """--data-cache-path, or a folder beside the data."""
    return Path(flags.data_cache_path) if flags.data_cache_path else Path(prefix).parent / CACHE_FOLDER_NAME


def summary_lines(flags: DataFlags, datasets: Sequence[Dataset | None]) -> list[str]:
    """What the run reads, a line a split and dataset: samples, realised share beside the asked one, epochs."""
    lines = []
    for name, source, dataset in zip(SPLIT_NAMES, split_sources(flags), datasets, strict=True):
        if dataset is None or source is None:
            continue
        parts = [dataset] if isinstance(dataset, GPTDataset) else dataset.datasets
        counts = [len(dataset)] if isinstance(dataset, GPTDataset) else dataset.counts()
        for prefix, share, part, count in zip(source.prefixes, source.shares, parts, counts, strict=True):
            epochs = part.epochs if part is not None else None
            lines.append(
                f"{name}: {count} samples of {prefix}: share {count / max(1, sum(counts)):.6f} (asked {share:.6f})"
                + (f", {epochs.count} epoch(s) of {epochs.tokens} tokens" if epochs else "")
            )
    return lines


def check_extension(
    flags: DataFlags, *, seq_length: int, seed: int, before: int, after: int, multiple: int = 1
) -> None:
    """May a run planned for `before` train samples have `after` instead? The order of its past must stay.

    Raises:
        UserError: it would be reshuffled; names the last safe --train-samples in that direction, a `multiple`
            of the batch.
    """
    source = split_sources(flags)[0]
    if source is None or after == before:
        return
    planned = build_split(source, flags, {}, seq_length=seq_length, seed=seed, samples=before)
    safe = safe_samples(source, planned, before, after)
    if after != safe:
        way = "more" if after > before else "fewer"
        safe = safe // multiple * multiple if after > before else -(-safe // multiple) * multiple
        raise UserError(
            f"--train-samples {after}: the run was planned for {before}, and {way} than {safe} would reshuffle the "
            f"samples it has already seen: {safe} is the last safe value"
            + (f" (--train-iters {safe // multiple})" if multiple > 1 else "")
        )


def safe_samples(source: Source, planned: Dataset, before: int, after: int) -> int:
    """The number of samples nearest to `after` that keeps the order of `planned`, a run of `before` samples."""
    if isinstance(planned, GPTDataset):
        return min(max(after, planned.epochs.first_safe_samples), planned.epochs.last_safe_samples)
    choices = blend_choices(source.shares, max(before, after))
    safe = after
    for number, part in enumerate(planned.datasets):
        if part is None:  # it has no past
            continue
        steps = np.flatnonzero(choices == number)
        last, first = part.epochs.last_safe_samples, part.epochs.first_safe_samples
        if after > before and len(steps) > last:
            safe = min(safe, int(steps[last]))
        if after < before and first > 1:
            safe = max(safe, int(steps[first - 1]) + 1)
    return safe
