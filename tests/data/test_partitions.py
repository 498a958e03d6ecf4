from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.chunks import Position
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job, Progress
from megatron_rgpt.data.manifest import read_manifest
from megatron_rgpt.data.partitions import part_jobs, preprocess_in_parts, span_borders
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import UserError


def lines(seed: int, count: int) -> bytes:
    random = np.random.default_rng(seed)
    texts = [f"number {i} " * int(random.integers(1, 30)) for i in range(count)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """One long file, a compressed one, text files and a short file."""
    monkeypatch.setattr("megatron_rgpt.data.chunks.CHUNK_BYTES", 3000)
    monkeypatch.setattr("megatron_rgpt.data.giant.PIECE_BYTES", 3000)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(0, 400))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(1, 200)))
    for i in range(12):
        (folder / f"c{i:02}.txt").write_text(f"text {i} " * 100)
    (folder / "d.jsonl").write_bytes(lines(2, 20) + b"broken\n")
    return Job(
        files=list_inputs([str(folder)]),
        output_prefix=str(tmp_path / "whole"),
        tokenizer=build_tokenizer("byte"),
        append_eod=True,
        stop_on_error=False,
    )


def pair(job: Job) -> list[bytes]:
    return [Path(f"{job.prefixes[0]}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.parametrize("partitions", [2, 3, 7])
def test_the_bytes_do_not_depend_on_the_number_of_partitions(tmp_path: Path, job: Job, partitions: int) -> None:
    expected = preprocess(job)[0]
    parted = replace(job, output_prefix=str(tmp_path / "parted"), workers=4)
    reports: list[Progress] = []
    manifest = preprocess_in_parts(parted, partitions, reports.append)[0]
    assert pair(parted) == pair(job)
    assert replace(manifest, skipped_examples=[]) == replace(expected, skipped_examples=[])
    assert manifest.skipped == {"broken JSON": 1}
    assert reports[-1].documents == manifest.documents
    assert Path(f"{parted.output_prefix}.skipped.txt").read_text().startswith(f"{job.files[-1].path}:21: broken JSON")
    assert len(list(tmp_path.glob("parted*"))) == 4
    assert preprocess_in_parts(parted, partitions, reports.append) == [manifest]


def test_spans_cover_the_input_without_gap(job: Job) -> None:
    for partitions in (2, 5, 40):
        parts = part_jobs(job, partitions)
        assert parts[0].start == Position() and parts[-1].end == Position(len(job.files))
        assert all(before.end == after.start for before, after in itertools.pairwise(parts))
        order = [(part.start.file, part.start.offset) for part in parts]
        assert order == sorted(set(order))


def test_a_single_file_is_cut_at_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0, 100))
    data = (tmp_path / "a.jsonl").read_bytes()
    borders = span_borders(list_inputs([str(tmp_path / "a.jsonl")]), 8)
    assert len(borders) == 7
    assert all(data[border.offset - 1 : border.offset] == b"\n" for border in borders)


def test_partitions_that_were_killed_go_on_to_the_same_bytes(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rgpt.data.preprocess.JOURNAL_SECONDS", 0.0)
    preprocess(job)
    parted = replace(job, output_prefix=str(tmp_path / "parted"))
    child = os.fork()
    if child == 0:
        count = 0

        def report(progress: Progress) -> None:
            nonlocal count
            count += 1
            if count == 12:
                # The whole family at once, as a batch system does.
                os.killpg(os.getpgid(0), signal.SIGKILL)

        os.setpgid(0, 0)
        preprocess_in_parts(parted, 3, report)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.glob("parted_text*"))
    preprocess_in_parts(parted, 3, lambda progress: None)
    assert pair(parted) == pair(job)
    assert read_manifest(parted.prefixes[0]) is not None


def test_a_fault_in_one_part_stops_all_and_names_the_place(tmp_path: Path, job: Job) -> None:
    strict = replace(job, output_prefix=str(tmp_path / "parted"), stop_on_error=True)
    with pytest.raises(UserError, match=r"d\.jsonl:21: broken JSON"):
        preprocess_in_parts(strict, 3, lambda progress: None)
    assert not list(tmp_path.glob("parted_text*"))
