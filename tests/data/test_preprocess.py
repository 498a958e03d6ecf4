from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job, Progress
from megatron_rgpt.data.manifest import check_tokenizer, read_manifest
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import UserError

BYTE = build_tokenizer("byte")
TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"


def job(tmp_path: Path, *inputs: Path, **changes: object) -> Job:
    flags: dict[str, object] = {"tokenizer": BYTE, "append_eod": True, **changes}
    options = {key: flags.pop(key) for key in ("suffixes", "exclude", "file_format") if key in flags}
    files = list_inputs([str(path) for path in inputs], **options)  # type: ignore[arg-type]
    return Job(files=files, output_prefix=str(flags.pop("output", tmp_path / "out")), **flags)  # type: ignore[arg-type]


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def texts_of(prefix: Path | str) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [BYTE.decode(dataset[i].tolist()) for i in range(len(dataset))]


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of many chunks."""
    monkeypatch.setattr("megatron_rgpt.data.chunks.CHUNK_BYTES", 2000)
    random = np.random.default_rng(0)
    return write_lines(tmp_path / "big.jsonl", [f"text {i} " * int(random.integers(1, 40)) for i in range(600)])


def test_lines_become_documents_that_end_with_the_end_token(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["hello", "wörld"])
    manifests = preprocess(job(tmp_path, source))
    assert texts_of(tmp_path / "out_text_document") == ["hello<|endoftext|>", "wörld<|endoftext|>"]
    assert (manifests[0].documents, manifests[0].tokens, manifests[0].max_id) == (2, 13, 256)
    assert read_manifest(str(tmp_path / "out_text_document")) == manifests[0]
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out_text_document.bin",
        "out_text_document.idx",
        "out_text_document.manifest.json",
    ]


def test_without_append_eod_nothing_is_added(tmp_path: Path) -> None:
    preprocess(job(tmp_path, write_lines(tmp_path / "a.jsonl", ["hello"]), append_eod=False))
    assert texts_of(tmp_path / "out_text_document") == ["hello"]


def test_each_json_key_gets_a_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "T", "text": "body"}\n{"title": "U", "text": "more"}')
    preprocess(job(tmp_path, tmp_path / "a.jsonl", keys=("text", "title"), append_eod=False))
    assert texts_of(tmp_path / "out_text_document") == ["body", "more"]
    assert texts_of(tmp_path / "out_title_document") == ["T", "U"]


def test_folders_give_their_files_in_one_order_on_every_machine(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "B.py", "sub/a.py", "site-packages/x.py", "c.txt", ".hidden/a.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    preprocess(job(tmp_path, tmp_path / "in", suffixes=[".py"], exclude=["site-*"], append_eod=False))
    assert texts_of(tmp_path / "out_text_document") == ["B.py", "a.py", "b.py", "sub/a.py"]


def test_globs_and_compressed_files_are_read(tmp_path: Path) -> None:
    import zstandard

    lines = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines) + gzip.compress(b'{"text": "three"}'))
    frames = [zstandard.compress(lines[:16]), zstandard.compress(lines[16:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    preprocess(job(tmp_path, tmp_path / "*.jsonl.*", append_eod=False))
    assert texts_of(tmp_path / "out_text_document") == ["one", "two", "one", "two", "three"]


@pytest.mark.parametrize("workers", [2, 4])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, big: Path, workers: int) -> None:
    for number in (1, workers):
        (tmp_path / str(number)).mkdir()
        preprocess(job(tmp_path, big, output=tmp_path / str(number) / "out", workers=number))
    assert outputs(tmp_path / "1") == outputs(tmp_path / str(workers))
    assert len(IndexedDataset(tmp_path / "1" / "out_text_document")) == 600


@pytest.mark.parametrize("kill_at", [2, 7, 40])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(
    tmp_path: Path, big: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int, workers: int
) -> None:
    monkeypatch.setattr("megatron_rgpt.data.preprocess.JOURNAL_SECONDS", 0.0)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(big.read_bytes()))
    preprocess(job(tmp_path, big, packed, output=tmp_path / "whole" / "out"))
    again = job(tmp_path, big, packed, output=tmp_path / "killed" / "out", workers=workers)
    while _killed_after(kill_at, again):
        assert not outputs(tmp_path / "killed")
    assert outputs(tmp_path / "killed") == outputs(tmp_path / "whole")
    assert read_manifest(again.prefixes[0]) == read_manifest(str(tmp_path / "whole" / "out_text_document"))


def _killed_after(chunks: int, work: Job) -> bool:
    """Run the job in a child that kills itself after so many chunks; whether it came to that."""
    child = os.fork()
    if child == 0:
        count = 0

        def report(progress: Progress) -> None:
            nonlocal count
            count += 1
            if count == chunks:
                os.kill(os.getpid(), signal.SIGKILL)

        _leave_after(lambda: preprocess(work, report))
    return _was_killed(child)


@pytest.mark.parametrize("step", ["os.replace", "os.fsync"])
def test_a_kill_at_any_step_of_the_renaming_is_mended(tmp_path: Path, step: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["hello", "world"])
    (tmp_path / "whole").mkdir()
    preprocess(job(tmp_path, source, output=tmp_path / "whole" / "out", keys=("text",)))
    for kill_at in range(1, 30):
        folder = tmp_path / f"killed{kill_at}"
        folder.mkdir()
        work = job(tmp_path, source, output=folder / "out")
        if not _killed_at_call(step, kill_at, work):
            assert kill_at > 3
            return
        present = {path.name for path in folder.iterdir()}
        assert "out_text_document.idx" not in present or IndexedDataset(folder / "out_text_document")
        preprocess(work)
        assert outputs(folder) == outputs(tmp_path / "whole")
        assert len(list(folder.iterdir())) == 3
    pytest.fail("the run never ended")


def _killed_at_call(name: str, number: int, work: Job) -> bool:
    """Run the job in a child that dies just before call `number` of an `os` function."""
    child = os.fork()
    if child == 0:
        original, count = getattr(os, name.removeprefix("os.")), 0

        def counted(*arguments: object, **more: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **more)

        setattr(os, name.removeprefix("os."), counted)
        _leave_after(lambda: preprocess(work))
    return _was_killed(child)


def _leave_after(action: Callable[[], object]) -> None:
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _was_killed(child: int) -> bool:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_finished_run_is_not_done_again_and_other_output_is_not_overwritten(tmp_path: Path) -> None:
    first = job(tmp_path, write_lines(tmp_path / "a.jsonl", ["hello"]))
    manifests = preprocess(first)
    time = os.stat(tmp_path / "out_text_document.bin").st_mtime_ns
    assert preprocess(first) == manifests
    assert os.stat(tmp_path / "out_text_document.bin").st_mtime_ns == time
    other = write_lines(tmp_path / "b.jsonl", ["other"])
    with pytest.raises(UserError, match="--overwrite"):
        preprocess(job(tmp_path, other))
    preprocess(job(tmp_path, other, overwrite=True))
    assert texts_of(tmp_path / "out_text_document") == ["other<|endoftext|>"]


BAD_LINES = {
    b'{"text": "unfinished': "broken JSON",
    b'{"other": "x"}': "no key 'text'",
    b'{"text": 5}': "'text' is not a string but int",
    b'{"text": null}': "'text' is not a string but NoneType",
    b'["text"]': "not a JSON object but list",
    b'{"text": "\xff\xfe"}': "invalid UTF-8 at byte 10",
    b"\x00\x00\x00": "NUL bytes",
    b'{"text": "a\\u0000b"}': "NUL characters",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b"[" * 200_000: "broken JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items())
def test_a_bad_line_stops_with_file_and_line_and_skip_goes_on_from_there(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:3: .*--on-error skip") as error:
        preprocess(job(tmp_path, source, append_eod=False))
    assert reason in str(error.value)
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.idx"))
    manifest = preprocess(job(tmp_path, source, stop_on_error=False, append_eod=False))[0]
    assert texts_of(tmp_path / "out_text_document") == ["good", "fine"]
    assert sum(manifest.skipped.values()) == 1
    assert manifest.skipped_examples[0].startswith(f"{source}:3: ") and reason in manifest.skipped_examples[0]


def test_every_document_left_out_is_in_the_log_once_even_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rgpt.data.giant.PIECE_BYTES", 500)
    monkeypatch.setattr("megatron_rgpt.data.preprocess.JOURNAL_SECONDS", 0.0)
    source = tmp_path / "a.jsonl"
    source.write_text("".join('{"text": "good"}\n' if i % 3 else '{"text": 5}\n' for i in range(1, 601)))
    work = job(tmp_path, source, stop_on_error=False)
    while _killed_after(9, work):
        pass
    expected = [f"{source}:{i}: 'text' is not a string but int" for i in range(3, 601, 3)]
    assert (tmp_path / "out.skipped.txt").read_text().splitlines() == expected
    manifest = read_manifest(work.prefixes[0])
    assert manifest is not None and manifest.skipped == {"'text' is not a string but int": 200}
    assert manifest.skipped_examples == expected[:100]


def test_empty_documents_are_counted_and_stop_nothing(tmp_path: Path) -> None:
    manifest = preprocess(job(tmp_path, write_lines(tmp_path / "a.jsonl", ["a", "", "b"])))[0]
    assert (manifest.documents, manifest.skipped) == (2, {"empty document": 1})


def test_bad_text_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in {"a": b"good", "b": b"\xff", "c": b"x\x00", "d.gz": gzip.compress(b"x" * 9999)[:-20]}.items():
        (folder / name).write_bytes(data)
    (folder / "gone").write_bytes(b"x")
    work = job(tmp_path, folder, stop_on_error=False)
    (folder / "gone").unlink()
    manifest = preprocess(work)[0]
    assert manifest.documents == 1
    assert [example.removeprefix(f"{folder}/") for example in manifest.skipped_examples] == [
        "b: invalid UTF-8 at byte 0",
        "c: NUL characters in the text",
        "d.gz: damaged or truncated: Compressed file ended before the end-of-stream marker was reached",
        "gone: cannot read: No such file or directory",
    ]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_truncated_compressed_file_is_never_taken_for_whole(tmp_path: Path, kind: str) -> None:
    import zstandard

    lines = b"".join(b'{"text": "line %d %d"}\n' % (i, i * i * 7919) for i in range(3000))
    data = gzip.compress(lines) if kind == "gz" else zstandard.compress(lines)
    (tmp_path / f"a.jsonl.{kind}").write_bytes(data[: len(data) // 2])
    good = write_lines(tmp_path / "b.jsonl", ["good"])
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}:\d+: damaged or truncated"):
        preprocess(job(tmp_path, tmp_path / f"a.jsonl.{kind}", good))
    manifest = preprocess(job(tmp_path, tmp_path / f"a.jsonl.{kind}", good, stop_on_error=False))[0]
    assert manifest.skipped == {"damaged or truncated": 1}
    assert texts_of(tmp_path / "out_text_document")[-1] == "good<|endoftext|>"


def test_no_usable_document_is_an_error_and_leaves_no_pair(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no usable document in 1 file.*1 × empty document"):
        preprocess(job(tmp_path, write_lines(tmp_path / "a.jsonl", [""])))
    assert not list(tmp_path.glob("*.bin"))


def test_a_full_disk_is_one_line_and_leaves_no_pair(tmp_path: Path, big: Path) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
        "sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    flags = ["--tokenizer-type", "byte", "--workers", "1", "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOOL), "--input", str(big), *flags], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "out_text_document.bin.part: cannot write: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.idx"))


def test_the_tool_tokenizes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("print('hello')\n")
    flags = ["--suffix", ".py", "--tokenizer-type", "gpt2", "--append-eod", "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--input", str(tmp_path / "in"), *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "1 documents, 6 tokens" in done.stdout and "MB/s" in done.stderr
    tokens = IndexedDataset(tmp_path / "out_text_document").tokens.tolist()
    assert build_tokenizer("gpt2").decode(tokens) == "print('hello')\n<|endoftext|>"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--input", "/nowhere", "--tokenizer-type", "byte"], "--input /nowhere"),
        (["--input", "IN", "--tokenizer-type", "words"], "--tokenizer-type words"),
        (["--input", "IN", "--tokenizer-type", "sentencepiece"], "needs --tokenizer-model"),
        (["--input", "IN", "--tokenizer-type", "byte", "--json-keys", "a", "a"], "--json-keys a a"),
        (["--input", "IN", "--tokenizer-type", "byte", "--workers", "0"], "--workers: 0: must be at least 1"),
        (["--input", "IN", "--tokenizer-type", "byte", "--split-sentences"], "--split-sentences"),
        (["--input", "IN"], "--tokenizer-type"),
    ],
)
def test_bad_flags_end_with_one_line(tmp_path: Path, flags: list[str], says: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["x"])
    flags = [str(source) if flag == "IN" else flag for flag in flags]
    done = subprocess.run(
        [sys.executable, str(TOOL), *flags, "--output-prefix", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and says in done.stderr and done.stderr.count("\n") == 1


def test_a_run_with_another_tokenizer_is_refused_by_the_manifest(tmp_path: Path) -> None:
    preprocess(job(tmp_path, write_lines(tmp_path / "a.jsonl", ["x"])))
    check_tokenizer(str(tmp_path / "out_text_document"), BYTE)
    with pytest.raises(UserError, match=r"made with tokenizer 'byte'.*the run has 'gpt2'"):
        check_tokenizer(str(tmp_path / "out_text_document"), build_tokenizer("gpt2"))


def test_an_input_that_grows_while_it_is_read_makes_no_pair(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["hello", "world"])

    def report(progress: Progress) -> None:
        with open(source, "a") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(UserError, match=r"a\.jsonl: changed while it was read"):
        preprocess(job(tmp_path, source), report)
    assert not list(tmp_path.glob("*.bin"))


def test_text_files_have_no_keys(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"--json-keys a b: .*a\.txt is text"):
        job(tmp_path, tmp_path / "a.txt", keys=("a", "b"))
