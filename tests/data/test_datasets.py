from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.blend import BlendedDataset
from megatron_rgpt.data.datasets import build_datasets, check_extension, summary_lines
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import UserError
from tests.data.pairs import data_flags, random_documents, write_pair


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_pair(tmp_path / "a", random_documents(0, 200, 30))


def test_splits_share_no_document(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[number] * 8 for number in range(100)])
    flags = data_flags(prefix, cache=tmp_path, split="80,15,5")
    parts = build_datasets(flags, seq_length=4, seed=1, samples=(160, 30, 10))
    seen = [{int(token) for i in range(len(part)) for token in part[i]} for part in parts]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    assert max(seen[0]) < 80 <= min(seen[1]) and max(seen[1]) < 95 <= min(seen[2])


def test_splits_that_are_not_needed_are_none(tmp_path: Path, pair: str) -> None:
    flags = data_flags(pair, cache=tmp_path, split="100,0,0")
    train, valid, test = build_datasets(flags, seq_length=8, seed=1, samples=(10, 0, 0))
    assert len(train) >= 10 and valid is None and test is None


@pytest.mark.parametrize(
    ("split", "samples", "says"),
    [
        ("100,0,0", (10, 5, 0), "--split 100,0,0: the valid share is 0"),
        ("9999,1,0", (10, 5, 0), r"--split 9999,1,0: the valid part of .* \(200 sequences\) is empty"),
        ("nonsense", (10, 5, 0), "--split nonsense"),
    ],
)
def test_an_empty_split_that_the_run_needs_names_the_flag(
    tmp_path: Path, pair: str, split: str, samples: tuple[int, int, int], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build_datasets(data_flags(pair, cache=tmp_path, split=split), seq_length=8, seed=1, samples=samples)


def test_a_blend_takes_each_dataset_at_its_weight_and_at_exactly_its_count(tmp_path: Path, pair: str) -> None:
    other = write_pair(tmp_path / "b", random_documents(1, 50, 30))
    flags = data_flags("0.7", pair, "0.3", other, cache=tmp_path)
    train, _, _ = build_datasets(flags, seq_length=8, seed=1, samples=(1000, 0, 0))
    assert isinstance(train, BlendedDataset) and len(train) == 1000
    assert train.counts() == [700, 300]
    assert all(len(part) >= count for part, count in zip(train.datasets, train.counts(), strict=True))
    np.testing.assert_array_equal(train[0], train.datasets[0][0])
    lines = summary_lines(flags, (train, None, None))
    assert "share 0.700000 (asked 0.700000)" in lines[0] and "share 0.300000 (asked 0.300000)" in lines[1]


def test_each_split_may_have_paths_of_its_own(tmp_path: Path, pair: str) -> None:
    other = write_pair(tmp_path / "b", [[5] * 100])
    flags = data_flags(cache=tmp_path, train_data_path=(pair,), valid_data_path=(other,))
    train, valid, _ = build_datasets(flags, seq_length=8, seed=1, samples=(10, 3, 0))
    assert set(valid[0].tolist()) == {5}
    assert len(train.documents) == 200
    with pytest.raises(UserError, match="--test-data-path is missing"):
        build_datasets(flags, seq_length=8, seed=1, samples=(10, 3, 1))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--data-path is missing"),
        (("0", "P", "1", "P"), "must be above 0"),
        (("-1", "P", "1", "P"), "must be above 0"),
        (("nan", "P", "1", "P"), "must be above 0"),
        (("P", "P"), "expected a weight before each prefix"),
        (("1", "P", "P"), "stands alone"),
        (("1e308", "P", "1e308", "P"), "infinity"),
        (("missing",), "missing.idx: cannot read the index"),
        (("1", "P") * 32768, "at most 32767"),
    ],
)
def test_bad_paths_and_weights_are_one_line(tmp_path: Path, pair: str, words: tuple[str, ...], says: str) -> None:
    flags = data_flags(*[pair if word == "P" else word for word in words], cache=tmp_path / "cache")
    with pytest.raises(UserError, match=says):
        build_datasets(flags, seq_length=8, seed=1, samples=(10, 0, 0))


def test_an_id_outside_the_vocabulary_is_found_before_training(tmp_path: Path) -> None:
    documents = random_documents(0, 100, 30, vocab=50)
    documents[63] = np.array([1, 2, 777, 3])
    flags = data_flags(write_pair(tmp_path / "a", documents), cache=tmp_path)
    build_datasets(flags, seq_length=8, seed=1, samples=(10, 1, 0), vocab_size=778)
    with pytest.raises(UserError, match=r"a\.bin: byte \d+ \(sequence 63\): token id 777 .*--vocab-size"):
        build_datasets(flags, seq_length=8, seed=1, samples=(10, 1, 0), vocab_size=777)


def test_rewritten_data_does_not_meet_an_old_index(tmp_path: Path) -> None:
    flags = data_flags(write_pair(tmp_path / "a", [[1] * 100]), cache=tmp_path)
    before, _, _ = build_datasets(flags, seq_length=9, seed=1, samples=(5, 0, 0))
    status = os.stat(tmp_path / "a.bin")
    write_pair(tmp_path / "a", [[2] * 50, [2] * 50])
    os.utime(tmp_path / "a.bin", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after, _, _ = build_datasets(flags, seq_length=9, seed=1, samples=(5, 0, 0))
    assert (len(before.documents), len(after.documents)) == (1, 2)
    assert set(after[0].tolist()) == {2}


def test_growing_a_run_keeps_its_past_up_to_the_value_that_the_error_names(tmp_path: Path, pair: str) -> None:
    other = write_pair(tmp_path / "b", random_documents(1, 20, 30))
    for words in ((pair,), ("0.6", pair, "0.4", other)):
        flags = data_flags(*words, cache=tmp_path / "cache", split="1,0,0")
        for before in (30, 60, 300, 700):
            with pytest.raises(UserError, match="last safe value") as error:
                check_extension(flags, seq_length=8, seed=1, before=before, after=100_000)
            safe = int(str(error.value).split(": ")[-1].split()[0])
            check_extension(flags, seq_length=8, seed=1, before=before, after=safe)
            orders = []
            for samples in (before, safe, safe + 1):
                train, _, _ = build_datasets(flags, seq_length=8, seed=1, samples=(samples, 0, 0))
                orders.append(np.stack([train[i] for i in range(before)]))
            np.testing.assert_array_equal(orders[0], orders[1])
            assert (orders[0] != orders[2]).any()


def test_a_run_with_another_tokenizer_than_its_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("some text that becomes a pair " * 20)
    job = Job(list_inputs([str(tmp_path / "in.txt")]), str(tmp_path / "out"), build_tokenizer("byte"))
    preprocess(job)
    flags = data_flags(job.prefixes[0], cache=tmp_path, split="1,0,0")
    build_datasets(flags, seq_length=8, seed=1, samples=(10, 0, 0))
    with pytest.raises(UserError, match=r"made with tokenizer 'byte'.*the run has 'gpt2'.*--tokenizer-type"):
        build_datasets(replace(flags, tokenizer_type="gpt2"), seq_length=8, seed=1, samples=(10, 0, 0))


def test_cutting_a_run_short_keeps_its_past_down_to_the_value_that_the_error_names(tmp_path: Path, pair: str) -> None:
    other = write_pair(tmp_path / "b", random_documents(1, 20, 30))
    for words in ((pair,), ("0.6", pair, "0.4", other)):
        flags = data_flags(*words, cache=tmp_path / "cache", split="1,0,0")
        with pytest.raises(UserError, match=r"fewer than .* last safe value") as error:
            check_extension(flags, seq_length=8, seed=1, before=1000, after=20)
        safe = int(str(error.value).split(": ")[-1].split()[0])
        check_extension(flags, seq_length=8, seed=1, before=1000, after=safe)
        orders = []
        for samples in (1000, safe, safe - 1):
            train, _, _ = build_datasets(flags, seq_length=8, seed=1, samples=(samples, 0, 0))
            orders.append(np.stack([train[i] for i in range(safe - 1)]))
        np.testing.assert_array_equal(orders[0], orders[1])
        assert (orders[0] != orders[2]).any()
