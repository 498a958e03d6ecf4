"""Megatron-LM itself (the PyPI package megatron-core) beside ours: files both ways, and every index."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rgpt.data.blend import blend_choices, normalised, occurrence
from megatron_rgpt.data.datasets import build_datasets
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.masks import loss_mask, position_ids
from megatron_rgpt.data.sample_index import build_indices, count_epochs, split_bookends, split_range
from megatron_rgpt.data.samples import GPTDataset
from tests.data.pairs import data_flags, random_documents, write_pair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of optional accelerators that are not installed
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.utils import Split, normalize

MANY = settings(max_examples=300, deadline=None)
FEW = settings(max_examples=40, deadline=None)


class InMemory:
    """What Megatron's GPTDataset needs of a low-level dataset, with lengths alone."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.sequence_lengths = lengths


def gpt_config(
    *, seq_length: int, seed: int, blend: object = None, split: str | None = None, cache: str | None = None
) -> gpt_dataset.GPTDatasetConfig:
    return gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        split=split,
        path_to_cache=cache,
        tokenizer=SimpleNamespace(vocab_size=1000, eod=0, pad=-1, unique_identifiers="none"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def megatron_dataset(
    low_level: object, first: int, end: int, samples: int | None, seq_length: int, seed: int, split: Split = Split.train
) -> gpt_dataset.GPTDataset:
    """Megatron's dataset of sequences [first, end). A config without paths keeps its index in memory."""
    config = gpt_config(seq_length=seq_length, seed=seed)
    indices = np.arange(first, end, dtype=np.int32)
    return gpt_dataset.GPTDataset(low_level, "none", indices, samples, split, config)


@pytest.mark.parametrize(("code", "dtype"), [("<u2", np.uint16), ("<i4", np.int32), ("u1", np.uint8)])
def test_megatron_reads_our_pairs(tmp_path: Path, code: str, dtype: type) -> None:
    documents = random_documents(0, 60, 50, vocab=200)
    theirs = indexed_dataset.IndexedDataset(write_pair(tmp_path / "a", documents, code))
    assert len(theirs) == 60
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(theirs[i], document)
        assert theirs[i].dtype == dtype
    np.testing.assert_array_equal(theirs.document_indices, np.arange(61))
    theirs.index.sequence_pointers  # noqa: B018 - read without complaint


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_our_pairs_are_byte_for_byte_those_of_megatron(tmp_path: Path, dtype: type) -> None:
    random = np.random.default_rng(1)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    with IndexedWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        for _ in range(80):
            sequences = [random.integers(0, 1000, random.integers(0, 20)) for _ in range(random.integers(1, 4))]
            builder.add_document(np.concatenate(sequences), [len(part) for part in sequences])
            for part in sequences:
                writer.append(part)
                writer.end_sequence()
            writer.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = indexed_dataset.IndexedDataset(str(tmp_path / "theirs"))
    np.testing.assert_array_equal(ours.document_indices, theirs.document_indices)
    for i in range(len(ours)):
        np.testing.assert_array_equal(ours[i], theirs[i])


def test_merging_gives_the_bytes_of_megatrons_merge(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / f"p{i}", random_documents(i, 20, 30)) for i in range(3)]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedWriter(tmp_path / "ours", np.dtype("<u2")) as writer:
        for prefix in prefixes:
            builder.add_index(prefix)
            writer.add_dataset(IndexedDataset(prefix))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@MANY
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(lambda lengths: sum(lengths) > 1),
    seq_length=st.integers(2, 40),
    wanted=st.one_of(st.none(), st.floats(0.02, 6.0)),
    seed=st.integers(0, 2**32 - 1),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_all_three_indices_equal_megatrons(
    lengths: list[int], seq_length: int, wanted: float | None, seed: int, part: tuple[float, float]
) -> None:
    array = np.array(lengths, dtype=np.int32)
    first, end = sorted(round(share * len(lengths)) for share in part)
    tokens = int(array[first:end].sum())
    if tokens < 2:
        first, end, tokens = 0, len(lengths), int(array.sum())
    samples = None if wanted is None else max(1, round(wanted * tokens / seq_length))
    theirs = megatron_dataset(InMemory(array), first, end, samples, seq_length, seed)
    ours = build_indices(array, first, end, count_epochs(tokens, seq_length, samples), seed)
    np.testing.assert_array_equal(ours["documents"], theirs.document_index)
    np.testing.assert_array_equal(ours["samples"], theirs.sample_index)
    np.testing.assert_array_equal(ours["shuffle"], theirs.shuffle_index)
    assert ours["samples"].dtype == theirs.sample_index.dtype
    assert ours["shuffle"].dtype == theirs.shuffle_index.dtype


@FEW
@given(
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    seq_length=st.integers(2, 33),
    epochs=st.floats(0.1, 4.0),
    seed=st.integers(0, 2**31),
)
def test_every_sample_has_megatrons_tokens(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], seq_length: int, epochs: float, seed: int
) -> None:
    documents = [np.arange(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
    prefix = write_pair(tmp_path_factory.mktemp("pair") / "a", documents)
    samples = max(1, int(epochs * sum(counts) / seq_length))
    indexed = IndexedDataset(prefix)
    ours = GPTDataset(indexed, 0, len(indexed), samples=samples, seq_length=seq_length, seed=seed)
    if sum(counts) < 2:
        return
    theirs = megatron_dataset(indexed_dataset.IndexedDataset(prefix), 0, len(indexed), samples, seq_length, seed)
    assert len(ours) == len(theirs)
    for i in range(len(ours)):
        np.testing.assert_array_equal(ours[i][:-1], theirs[i]["tokens"].numpy())
        np.testing.assert_array_equal(ours[i][1:], theirs[i]["labels"].numpy())


@MANY
@given(
    weights=st.lists(st.one_of(st.floats(1e-6, 1e6), st.integers(1, 8).map(float)), min_size=1, max_size=12),
    steps=st.integers(1, 3000),
    segment_steps=st.sampled_from([1, 7, 64]),
)
def test_blends_equal_megatrons_greedy_rule(weights: list[float], steps: int, segment_steps: int) -> None:
    shares = normalised(weights, ["x"] * len(weights))
    assert shares.tolist() == normalize(weights)
    choices, within = np.zeros(steps, dtype=np.int16), np.zeros(steps, dtype=np.int64)
    helpers.build_blending_indices(choices, within, shares, len(weights), steps, False)
    ours = blend_choices(shares, steps, segment_steps=segment_steps)
    np.testing.assert_array_equal(ours, choices)
    np.testing.assert_array_equal(occurrence(ours), within)


def test_a_blended_dataset_takes_what_megatrons_takes(tmp_path: Path) -> None:
    weights, size = [0.5, 0.3, 0.2], 700
    theirs = [megatron_dataset(InMemory(np.full(50, 40, dtype=np.int32)), 0, 50, size, 16, 5) for _ in weights]
    config = theirs[0].config
    blend = BlendedDataset(theirs, weights, size, config)
    choices = blend_choices(normalised(weights, ["x"] * 3), size)
    np.testing.assert_array_equal(choices, blend.dataset_index)
    np.testing.assert_array_equal(occurrence(choices), blend.dataset_sample_index)


@MANY
@given(
    parts=st.lists(st.one_of(st.integers(0, 1000), st.floats(0, 1).map(lambda x: round(x, 4))), min_size=1, max_size=3),
    sequences=st.integers(1, 10**9),
)
def test_splits_equal_megatrons(parts: list[float], sequences: int) -> None:
    if sum(parts) == 0:
        return
    text = ",".join(f"{part:f}" for part in parts)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    ours = split_bookends(text)
    for theirs, mine in zip(matrix, ours, strict=True):
        assert theirs == mine
        if theirs is not None:
            expected = tuple(round(edge * float(sequences)) for edge in theirs)
            assert split_range(mine, sequences) == expected


@MANY
@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3))
def test_masks_and_positions_equal_megatrons(rows: list[list[int]]) -> None:
    tokens_BS = np.array(rows)
    for row, mask, positions in zip(rows, loss_mask(tokens_BS, 3), position_ids(tokens_BS, 3), strict=True):
        _, theirs, their_positions = gpt_dataset._get_ltor_masks_and_position_ids(
            torch.tensor(row), 3, True, False, True, False
        )
        np.testing.assert_array_equal(mask, theirs.numpy())
        np.testing.assert_array_equal(positions, their_positions.numpy())


def test_the_datasets_of_a_run_are_those_of_megatrons_builder(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", random_documents(3, 300, 60))
    sizes = (900, 40, 10)
    config = gpt_config(
        seq_length=16, seed=1234, blend=([prefix], None), split="90,8,2", cache=str(tmp_path / "theirs")
    )
    theirs = BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, sizes, lambda: True, config).build()
    flags = data_flags(prefix, cache=tmp_path / "ours", split="90,8,2")
    ours = build_datasets(flags, seq_length=16, seed=1234, samples=sizes)
    for mine, megatrons in zip(ours, theirs, strict=True):
        assert len(mine) == len(megatrons)
        for i in range(len(mine)):
            np.testing.assert_array_equal(mine[i][:-1], megatrons[i]["tokens"].numpy())
