from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.content_hash import BLOCK_BYTES, BlockHash, hash_file
from megatron_rgpt.data.indexed import IndexedDataset, best_dtype
from megatron_rgpt.data.indexed_writer import IndexedWriter, part_paths
from megatron_rgpt.errors import UserError
from tests.data.pairs import random_documents, write_pair

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<u2", "<i4", "<i8"])
def test_what_was_written_is_read_back(tmp_path: Path, dtype: str) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", DOCUMENTS, dtype))
    assert [list(dataset[i]) for i in range(len(dataset))] == DOCUMENTS
    assert dataset.dtype == np.dtype(dtype)
    assert list(dataset.get(3, 1, 2)) == [6, 7]
    assert list(dataset.document_indices) == [0, 1, 2, 3, 4]
    assert list(dataset.sequence_lengths) == [3, 0, 1, 4]
    assert (dataset.num_tokens, dataset.num_documents) == (8, 4)


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[7, 8], [9]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 2, 1, 0, 4, 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<3H", 7, 8, 9)


def test_a_document_may_have_several_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        for part in ([1], [2, 3]):
            writer.append(np.array(part))
            writer.end_sequence()
        writer.end_document()
    assert list(IndexedDataset(tmp_path / "a").document_indices) == [0, 2]


def test_an_index_outside_is_an_index_error(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", DOCUMENTS))
    assert list(dataset[-1]) == DOCUMENTS[-1]
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(IndexError):
        dataset.get(0, 2, 2)


def test_nothing_stands_under_the_final_name_before_the_end(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a", np.dtype("<u2"))
    writer.add_document(np.arange(1000))
    writer.mark(durable=True)
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.idx"))
    writer.finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_an_error_while_writing_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(10))
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_prefix_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(10))
        with pytest.raises(UserError, match="another process"):
            IndexedWriter(tmp_path / "a", np.dtype("<u2"))
    assert list(IndexedDataset(tmp_path / "a")[0]) == list(range(10))


def test_a_writer_goes_on_from_a_mark_to_the_same_bytes(tmp_path: Path) -> None:
    documents = random_documents(0, 50, 40)
    write_pair(tmp_path / "whole", documents)
    writer = IndexedWriter(tmp_path / "a", np.dtype("<u2"))
    for document in documents[:20]:
        writer.add_document(document)
    state = writer.mark(durable=True)
    writer.add_document(documents[20])  # lost with the kill, or half there
    writer.close()
    writer = IndexedWriter(tmp_path / "a", np.dtype("<u2"), resume_from=state)
    for document in documents[20:]:
        writer.add_document(document)
    writer.finalize()
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    assert writer.content_hash() == hash_file(tmp_path / "whole.bin")


def test_a_rollback_drops_the_open_sequence(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2]))
        writer.mark(durable=False)
        writer.append(np.array([999] * 100_000))
        writer.rollback()
        writer.add_document(np.array([3]))
    assert IndexedDataset(tmp_path / "a").tokens.tolist() == [1, 2, 3]
    assert writer.content_hash() == hash_file(tmp_path / "a.bin")


def test_an_id_that_the_type_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="70000"), IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.array([70000]))


def test_appended_pairs_keep_their_documents(tmp_path: Path) -> None:
    first, second = random_documents(1, 9, 5), random_documents(2, 4, 30)
    write_pair(tmp_path / "a", first)
    write_pair(tmp_path / "b", second)
    with IndexedWriter(tmp_path / "c", np.dtype("<u2")) as writer:
        writer.add_dataset(IndexedDataset(tmp_path / "a"))
        writer.add_dataset(IndexedDataset(tmp_path / "b"))
    write_pair(tmp_path / "expected", [*first, *second])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"c.{suffix}").read_bytes() == (tmp_path / f"expected.{suffix}").read_bytes()


def test_opening_reads_the_header_and_the_last_entries_alone(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[1, 2]] * 100_000)
    before = _bytes_read()
    IndexedDataset(prefix)
    counted = _bytes_read() - before
    # What is left is the reading of the counter itself.
    own = _bytes_read() - before - counted
    assert counted - own <= 34 + 4 + 8 + 8 + 64


def _bytes_read() -> int:
    descriptor = os.open("/proc/self/io", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 4096).split(b"rchar: ")[1].split()[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda idx, bin: os.truncate(bin, 10), "10 bytes.*ends at byte 16"),
        (lambda idx, bin: bin.write_bytes(bin.read_bytes() + b"xx"), "18 bytes.*ends at byte 16"),
        (lambda idx, bin: os.truncate(idx, 60), "need 122 bytes.*has 60"),
        (lambda idx, bin: os.truncate(idx, 20), "truncated"),
        (lambda idx, bin: os.truncate(idx, 0), "not a Megatron index"),
        (lambda idx, bin: idx.write_bytes(b"PK" + idx.read_bytes()[2:]), "byte 0: not a Megatron index"),
        (lambda idx, bin: idx.write_bytes(_patched(idx, 9, b"\x02")), "version 2"),
        (lambda idx, bin: idx.write_bytes(_patched(idx, 17, b"\x07")), "dtype code 7"),
        (lambda idx, bin: idx.write_bytes(_patched(idx, 114, b"\x03")), "ends at sequence 3.*4 sequences"),
        (lambda idx, bin: idx.write_bytes(idx.read_bytes() + bytes(4)), "multimodal"),
        (lambda idx, bin: bin.unlink(), "cannot read the tokens"),
        (lambda idx, bin: idx.unlink(), "cannot read the index"),
    ],
)
def test_a_damaged_pair_is_one_line_that_names_file_and_numbers(tmp_path: Path, damage, says: str) -> None:
    prefix = write_pair(tmp_path / "a", DOCUMENTS)
    damage(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(UserError, match=says) as error:
        IndexedDataset(prefix)
    assert str(tmp_path / "a") in str(error.value)
    assert "\n" not in str(error.value)


def _patched(path: Path, at: int, new: bytes) -> bytes:
    data = path.read_bytes()
    return data[:at] + new + data[at + len(new) :]


def test_an_old_pair_is_replaced_only_by_a_whole_new_one(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1]])
    writer = IndexedWriter(tmp_path / "a", np.dtype("<u2"))
    writer.add_document(np.array([2, 3]))
    assert list(IndexedDataset(tmp_path / "a")[0]) == [1]
    writer.finalize()
    assert list(IndexedDataset(tmp_path / "a")[0]) == [2, 3]
    assert all(not path.exists() for path in part_paths(str(tmp_path / "a")))


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "u2"), (65499, "u2"), (65500, "i4"), (None, "i4")])
def test_the_type_follows_the_vocabulary(vocab: int | None, dtype: str) -> None:
    assert best_dtype(vocab) == np.dtype(dtype)


def test_the_hash_of_a_stream_can_be_resumed_anywhere(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(BLOCK_BYTES + 12345)
    path = tmp_path / "data"
    path.write_bytes(data)
    for cut in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 7):
        first = BlockHash()
        first.update(data[:cut])
        second = BlockHash.resume(path, first.chain, cut)
        second.update(data[cut:])
        assert second.hexdigest() == hash_file(path)
