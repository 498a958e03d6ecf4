from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.combine import merge, wrap
from megatron_rgpt.data.describe import document_ids, length_histogram
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job
from megatron_rgpt.data.manifest import read_manifest
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.data.verify import verify
from megatron_rgpt.errors import UserError
from tests.data.pairs import random_documents, write_pair

TOOL = Path(__file__).parents[2] / "tools" / "data.py"


def run(*arguments: object, ok: bool = True) -> str:
    """The tool's standard output, or, where it must fail, its one line of error."""
    done = subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == (0 if ok else 2), done.stderr
    if not ok:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stdout if ok else done.stderr


def quiet(done: int, total: int) -> None:
    pass


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """Five documents of text with a manifest."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"document number {i}, " * (i + 1))
    job = Job(list_inputs([str(folder)]), str(tmp_path / "a"), build_tokenizer("byte"), append_eod=True)
    preprocess(job)
    return job.prefixes[0]


def test_info_counts_tokens_documents_and_splits(pair: str) -> None:
    out = run("info", pair, "--split", "60,40,0")
    assert "tokens 290  documents 5  sequences 5" in out
    assert "min 20  quartiles 39 58 77  max 96  mean 58.0" in out
    assert "train  sequences 0 to 3: 3, 117 tokens" in out and "valid  sequences 3 to 5: 2, 173 tokens" in out
    assert "tokenizer byte, vocabulary 257" in out
    assert next(line.split() for line in out.splitlines() if "#" in line)[:2] == ["16-31", "1"]


def test_show_decodes_documents_and_samples(tmp_path: Path, pair: str) -> None:
    assert run("show", pair, "--document", 1) == "document number 1, document number 1, <|endoftext|>\n"
    flags = ["--seq-length", 9, "--split", "1,0,0", "--data-cache-path", tmp_path / "cache", "--train-samples", 20]
    sample = run("show", pair, "--sample", 3, *flags)
    ids = run("show", pair, "--sample", 3, "--ids", *flags).split()
    assert len(ids) == 10
    assert build_tokenizer("byte").decode([int(number) for number in ids]) + "\n" == sample
    assert "documents 0 to 4" in run("show", pair, "--document", 5, ok=False)
    assert "made with tokenizer 'byte'" in run("show", pair, "--document", 1, "--tokenizer-type", "gpt2", ok=False)


def test_a_document_of_several_sequences_is_shown_whole(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        for part in ([1, 2], [3]):
            writer.append(np.array(part))
            writer.end_sequence()
        writer.end_document()
    assert document_ids(IndexedDataset(tmp_path / "a"), 0).tolist() == [1, 2, 3]


def test_merge_keeps_order_and_adds_up_the_manifests(tmp_path: Path, pair: str) -> None:
    run("merge", pair, pair, "--output-prefix", tmp_path / "b")
    merged = IndexedDataset(tmp_path / "b")
    assert merged.tokens.tolist() == IndexedDataset(pair).tokens.tolist() * 2
    manifest = read_manifest(str(tmp_path / "b"))
    assert manifest is not None and (manifest.documents, manifest.tokens) == (10, 580)
    assert verify(str(tmp_path / "b"), None, quiet)[-1].startswith("manifest: counts and hash")
    assert "pass --overwrite" in run("merge", pair, "--output-prefix", tmp_path / "b", ok=False)


def test_pairs_that_do_not_belong_together_are_not_merged(tmp_path: Path, pair: str) -> None:
    other = write_pair(tmp_path / "b", [[1]], "<i4")
    with pytest.raises(UserError, match=r"holds int32, .* uint16"):
        merge([pair, other], str(tmp_path / "c"), print, overwrite=False)
    job = Job(list_inputs([str(tmp_path / "in")]), str(tmp_path / "gpt2"), build_tokenizer("gpt2"))
    preprocess(job)
    with pytest.raises(UserError, match="different tokenizers, 'byte' and 'gpt2'"):
        merge([pair, job.prefixes[0]], str(tmp_path / "c"), print, overwrite=False)
    with pytest.raises(UserError, match="one of the pairs to merge"):
        merge([pair, other[:-1] + "b"][:1], pair, print, overwrite=True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda idx, bin: patch(bin, 8, b"\x63\x00"), "hash .* has .*make or copy it again"),
        (lambda idx, bin: patch(bin, 8, b"\xff\x7f"), r"byte 8 \(sequence 0\): token id 32767 .*vocabulary of 257"),
        (
            lambda idx, bin: patch(idx, 34, b"\x16\x00\x00\x00\x28"),
            "sequence 1 is said to start at byte 40.*44",
        ),
        (lambda idx, bin: patch(idx, 34, b"\xff\xff\xff\xff"), "sequence 0 has a negative length"),
        (lambda idx, bin: patch(idx, 34 + 60 + 8, b"\x09"), "not in order at document 2"),
        (lambda idx, bin: bin.write_bytes(b""), "0 bytes"),
    ],
)
def test_verify_finds_what_is_wrong(pair: str, damage, says: str) -> None:
    assert len(verify(pair, None, quiet)) == 3
    damage(Path(f"{pair}.idx"), Path(f"{pair}.bin"))
    with pytest.raises(UserError, match=says):
        verify(pair, None, quiet)


def patch(path: Path, at: int, new: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def test_verify_says_what_it_could_not_hold_the_data_to(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", random_documents(0, 30, 20))
    assert "no manifest" in run("verify", prefix)
    with pytest.raises(UserError, match="vocabulary of 10"):
        verify(prefix, 10, quiet)


def test_prebuild_leaves_indexes_that_a_run_finds(tmp_path: Path, pair: str) -> None:
    flags = ["--seq-length", 9, "--split", "1,0,0", "--data-cache-path", tmp_path / "cache", "--train-samples", 50]
    out = run("prebuild", "--data-path", 0.25, pair, 0.75, pair, *flags)
    assert "share 0.240000 (asked 0.250000)" in out or "share 0.260000 (asked 0.250000)" in out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert before
    run("prebuild", "--data-path", 0.25, pair, 0.75, pair, *flags)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert "say how many samples" in run("prebuild", "--data-path", pair, ok=False)


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_wrap_makes_documents_of_a_raw_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("megatron_rgpt.data.combine.BLOCK_TOKENS", block)
    raw = tmp_path / "train.bin"
    np.array([5, 6, 0, 7, 0, 0, 8, 9], dtype="<u2").tofile(raw)
    dataset = wrap(raw, "uint16", 0, overwrite=False)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 0], [7, 0], [0], [8, 9]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    whole = wrap(raw, "uint16", None, overwrite=True)
    assert len(whole) == 1 and whole[0].tolist() == [5, 6, 0, 7, 0, 0, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.bin", "train.idx"]


def test_wrap_refuses_what_is_no_token_file(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"xyz")
    (tmp_path / "b.raw").write_bytes(b"xy")
    assert "no whole number" in run("wrap", tmp_path / "a.bin", ok=False)
    assert "must end in .bin" in run("wrap", tmp_path / "b.raw", ok=False)
    assert "not a token type" in run("wrap", tmp_path / "a.bin", "--dtype", "float32", ok=False)
    assert "--dtype nonsense" in run("wrap", tmp_path / "a.bin", "--dtype", "nonsense", ok=False)


def test_the_histogram_doubles_its_buckets() -> None:
    histogram = length_histogram(np.array([0, 1, 2, 3, 4, 7, 8]))
    assert histogram.edges == [0, 1, 2, 4, 8, 16]
    assert histogram.counts == [1, 1, 2, 2, 1]
