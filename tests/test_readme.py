"""The README's commands run: those for one machine here, made small; the launch scripts by tests/cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# flags that make a run of the README small enough for a test; later flags win
SMALL = (
    "--layout 1+1x2+1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --depths-per-step 2 --train-iters 2 --lr-warmup-iters 1 --eval-iters 1 --eval-interval 2 "
    "--log-interval 1"
)


def commands() -> list[str]:
    """The README's shell commands in order, continuation lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's relative paths work, with outputs of its own."""
    home = tmp_path_factory.mktemp("home")
    for name in ("pretrain_rgpt.py", "tools", "examples", "megatron_rgpt"):
        (home / name).symlink_to(ROOT / name)
    (home / ".venv").symlink_to(Path(sys.prefix))
    documents = [path.read_text() for path in sorted((ROOT / "megatron_rgpt").rglob("*.py"))]
    (home / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return home


def made_small(command: str) -> str:
    """The same command for a test: a small model, 2 ranks, little data."""
    if "pretrain_rgpt.py" in command and "--dry-run" not in command:
        command = command.replace("--num_gpus 4", "--num_gpus 2 --master_port 29631") + " " + SMALL
        if "data/corpus" not in command:
            command += " --data-path data/corpus_text_document --tokenizer-type gpt2 --split 80,20,0"
        else:
            command += " --split 80,20,0"
    if "benchmark.py" in command:
        command += " --rounds 1"
    if "benchmark.py model" in command:
        command += " --hidden-size 64 --seq-length 32 --vocab-size 500"
    if "benchmark.py save" in command:
        command += " --layout 1+1x2+1 --hidden-size 64"
    if "benchmark_pipeline.py" in command:
        command += " --rounds 1 --seconds 0.2"
    if "generate.py" in command:
        command += " --new-tokens 5"
    return command


def run(command: str, home: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, shell=True, cwd=home, env=environment, capture_output=True, text=True)


# what each kind of command must show; the make targets are CI's own
SHOWS = {
    "--dry-run": "63.60 M",
    "preprocess_data.py": "corpus_text_document",
    "deepspeed --num_gpus": "iteration 2/2",
    "report.py": "validation loss by exit",
    "checkpoint_convert.py export": "RecurrentGPTForCausalLM written to exports/small",
    "generate.py": "The meaning of life is",
    "torchrun": "iteration 2/2",
    "draw_pipeline.py": "core=4,8,8 coda=2,0,0: 4 micro-batches of depth 1 to 2, busy share 0.811",
    "--zero-stage 2": "ZeRO-2",
    "benchmark.py model": "measured / predicted",
    "benchmark.py loop": "job / bare",
    "benchmark_pipeline.py executed": "executed / replayed",
    "benchmark.py memory": "ZeRO-1 / ZeRO-0: 0.5",
    "benchmark.py save": "save / plain",
    "checkpoint.py info": "consumed samples",
    "checkpoint.py verify": "whole",
}


def test_every_command_of_the_readme_is_known_here() -> None:
    for command in commands():
        assert command.startswith("make ") or any(mark in command for mark in SHOWS), command


def test_the_commands_of_the_readme_run_in_their_order(home: Path) -> None:
    for command in commands():
        if command.startswith("make "):
            continue
        result = run(made_small(command), home)
        assert result.returncode == 0, f"{command}\n{result.stdout[-1000:]}\n{result.stderr[-3000:]}"
        marks = [text for mark, text in SHOWS.items() if mark in command]
        assert any(text in result.stdout for text in marks), f"{command}\n{result.stdout[-2000:]}"


def test_the_timeline_of_the_readme_is_what_its_command_draws(home: Path) -> None:
    (command,) = (command for command in commands() if "draw_pipeline.py" in command)
    drawn = run(command, home).stdout
    assert "".join(drawn.splitlines(keepends=True)[:4]) in README


def test_make_pretrain_runs_the_whole_demo(tmp_path: Path) -> None:
    environment = {**os.environ, "DEMO_FLAGS": f"{SMALL} --eval-interval 1", "MASTER_PORT": "29632"}
    result = subprocess.run(
        ["make", "pretrain", f"RUN={tmp_path / 'demo'}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    assert "looping gains" in result.stdout and "a sample:" in result.stdout
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.s*h")), ids=lambda path: path.name)
def test_every_example_script_parses(script: Path) -> None:
    assert script.suffix in (".sh", ".sbatch")
    subprocess.run(["bash", "-n", script], check=True)


def test_the_launch_scripts_name_configurations_that_exist() -> None:
    for script in [*(ROOT / "examples").rglob("*.sh"), *(ROOT / "examples").rglob("*.sbatch")]:
        for name in re.findall(r"examples/configs/[\w.+]+\.yaml", script.read_text()):
            assert (ROOT / name).is_file(), f"{script}: {name}"
