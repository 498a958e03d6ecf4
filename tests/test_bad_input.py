"""Bad input to the main job: one line that names the flag or file, exit code 2, no stack trace, nothing harmed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_rgpt
from tests.jobs import flags, job
from tests.ranks import RankPool

ROOT = Path(__file__).parent.parent

# a dry run says of more ranks than this test has what a run would say
PIPELINE = "--dry-run --world-size 12 --global-batch-size 48 --pipeline-model-parallel-size {}"


@pytest.fixture(scope="module")
def run(ranks: RankPool, byte_pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    ranks.run(job, flags(byte_pair, f"--save {folder} --exit-interval 2"), world=1)
    return folder


def complaint(argv: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> str:
    """Run the main job in this process; its one line of complaint."""
    monkeypatch.setattr(sys, "argv", ["pretrain_rgpt.py", *argv])
    with pytest.raises(SystemExit) as left:
        pretrain_rgpt.main()
    captured = capfd.readouterr()
    assert left.value.code == 2
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--no-such-flag", ["--no-such-flag"]),
        ("--fp16", ["--fp16", "not supported"]),
        ("--bf16", ["--bf16", "fp32", "contradict"]),
        ("--num-attention-heads 5", ["--num-attention-heads 5", "--hidden-size 32"]),
        ("--global-batch-size 7", ["--global-batch-size 7", "--micro-batch-size 2"]),
        ("--depths-per-step 3", ["--depths-per-step 3"]),
        ("--layout 1+1x+1", ["--layout", "1+1x+1"]),
        ("--data-path nowhere", ["nowhere.idx", "No such file"]),
        ("--split 100,0,0", ["--split 100,0,0", "valid"]),
        ("--vocab-size 100", [".bin", "byte ", "token id", "--vocab-size"]),
        ("--tokenizer-type morse", ["--tokenizer-type morse"]),
        ("--save /proc/nowhere/run", ["--save /proc/nowhere/run", "cannot be written"]),
        ("--load nowhere", ["--load nowhere", "no checkpoint"]),
        ("--deepspeed_config nowhere.json", ["--deepspeed_config nowhere.json"]),
        ("--config nowhere.yaml", ["--config nowhere.yaml"]),
        ("--load RUN --hidden-size 64", ["--load", "--hidden-size 32", "--hidden-size 64"]),
        ("--load RUN --layout 2+1x3+1", ["--load", "--layout 1+1x3+1", "--layout 2+1x3+1"]),
        ("--load RUN --seq-length 12", ["--load", "--seq-length 24", "--seq-length 12"]),
        ("--load RUN --seed 5", ["--seed 5", "1337"]),
        ("--tensor-model-parallel-size 3", ["--tensor-model-parallel-size 3", "--num-attention-heads 4"]),
        ("--tensor-model-parallel-size 4 --seq-length 22", ["--tensor-model-parallel-size 4", "--seq-length 22"]),
        ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2", "1 ranks"]),
        ("--tensor-model-parallel-size 2 --no-sequence-parallel", ["--no-sequence-parallel", "always"]),
        (PIPELINE.format(4), ["--pipeline-model-parallel-size 4", "--layout 1+1x3+1", "at most 3"]),
        (PIPELINE.format("2 --pipeline-placement core=1"), ["--pipeline-placement 'core=1'", "core=3,5,6,6"]),
        (PIPELINE.format(2) + " --zero-stage 2", ["--zero-stage 2", "--pipeline-model-parallel-size 2", "0 or 1"]),
        (PIPELINE.format(2) + " --layout 4", ["--pipeline-model-parallel-size 2", "--layout 4", "dense"]),
        ("--pipeline-model-parallel-size 2", ["--pipeline-model-parallel-size 2", "1 ranks"]),
        ("--pipeline-placement core=1", ["--pipeline-placement", "--pipeline-model-parallel-size of 2"]),
        ("--load RUN --global-batch-size 4", ["--global-batch-size 4", "has 8", "--finetune"]),
        ("--load RUN --split 50,50,0", ["--split 50,50,0", "80,20,0"]),
        ("--load RUN --train-iters 1", ["--train-iters 1", "iteration 2"]),
        ("--load RUN --save RUN --finetune", ["--save", "holds checkpoints"]),
        ("--config BINARY", ["--config", "not UTF-8"]),
        ("--gate-bias nan", ["--gate-bias nan"]),
        ("--save-interval 5", ["--save-interval 5", "--save FOLDER"]),
        ("--save-total-limit 2", ["--save-total-limit 2", "--save FOLDER"]),
        ("--save-total-limit 0 --save new", ["--save-total-limit 0", "positive"]),
        ("--save RUN", ["--save", "holds checkpoints", "--load"]),
    ],
)
def test_bad_input_ends_before_training_with_one_line(
    more: str, words: list[str], run: Path, byte_pair: str, monkeypatch, capfd
) -> None:
    binary = run / "binary"
    binary.write_bytes(b"\xff\xfe")
    argv = flags(byte_pair, more.replace("RUN", str(run)).replace("BINARY", str(binary)))
    line = complaint(argv, monkeypatch, capfd)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("core=1,1 coda=1,0", ["core places 2 blocks", "has 1"]),
        ("core=0,1 coda=1,1", ["coda places 2 blocks", "has 1"]),
        ("core=1,0,0 coda=0,1,0", ["core names 3 stages", "--pipeline-model-parallel-size is 2"]),
        ("core=1,0 coda=1,0", ["stage 1 holds no block"]),
    ],
)
def test_a_placement_that_does_not_add_up_ends_with_one_line(placement, words, byte_pair, monkeypatch, capfd) -> None:
    argv = [*flags(byte_pair, PIPELINE.format(2)), "--pipeline-placement", placement]
    line = complaint(argv, monkeypatch, capfd)
    assert all(word in line for word in [f"--pipeline-placement {placement!r}", *words]), line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--save RUN/config.yaml/run", ["--save", "config.yaml cannot be written"]),
        ("--load RUN --hidden-size 64", ["--hidden-size 32", "--hidden-size 64"]),
    ],
)
def test_a_dry_run_checks_what_it_can_without_the_data(
    more: str, words: list[str], run: Path, monkeypatch, capfd
) -> None:
    argv = flags("nowhere", f"--dry-run {more.replace('RUN', str(run))}")
    line = complaint(argv, monkeypatch, capfd)
    assert all(word in line for word in words), line


def test_a_dry_run_makes_no_folder(byte_pair: str, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_rgpt.py", *flags(byte_pair, f"--dry-run --save {tmp_path / 'new'}")])
    pretrain_rgpt.main()
    assert "data       checked" in capfd.readouterr().out
    assert not (tmp_path / "new").exists()


def test_a_run_without_a_length_is_told_to_give_one(byte_pair: str, monkeypatch, capfd) -> None:
    argv = flags(byte_pair)
    at = argv.index("--train-iters")
    line = complaint(argv[:at] + argv[at + 2 :], monkeypatch, capfd)
    assert "--train-iters N or --train-samples N" in line


def test_a_truncated_bin_is_told_with_both_sizes(byte_pair: str, tmp_path: Path, monkeypatch, capfd) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"cut{suffix}").write_bytes(Path(byte_pair + suffix).read_bytes())
    size = (tmp_path / "cut.bin").stat().st_size
    with (tmp_path / "cut.bin").open("r+b") as file:
        file.truncate(size - 10)
    line = complaint(flags(str(tmp_path / "cut")), monkeypatch, capfd)
    assert "cut.bin" in line and str(size) in line and str(size - 10) in line


def test_a_truncated_idx_is_told(byte_pair: str, tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "cut.bin").write_bytes(Path(byte_pair + ".bin").read_bytes())
    (tmp_path / "cut.idx").write_bytes(Path(byte_pair + ".idx").read_bytes()[:100])
    assert "cut.idx" in complaint(flags(str(tmp_path / "cut")), monkeypatch, capfd)


def test_nothing_saved_is_harmed_by_a_refused_run(run: Path, byte_pair: str, monkeypatch, capfd) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    complaint(flags(byte_pair, f"--save {run}"), monkeypatch, capfd)
    complaint(flags(byte_pair, f"--save {run} --load {run} --hidden-size 64"), monkeypatch, capfd)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_two_ranks_of_the_deepspeed_launcher_complain_once_and_leave_with_a_failure(byte_pair: str) -> None:
    deepspeed = Path(sys.executable).parent / "deepspeed"
    command = [deepspeed, "--num_gpus", "2", "--master_port", "29617", ROOT / "pretrain_rgpt.py"]
    result = subprocess.run(
        [*command, *flags(byte_pair, "--global-batch-size 7")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "--global-batch-size 7" in lines[0]
    assert "Traceback" not in result.stderr
