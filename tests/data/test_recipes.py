"""The recipes of examples/data on real text: three domains, blended, and a model trained on them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_rgpt.data.datasets import build_datasets, summary_lines
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.data.verify import verify
from tests.data.pairs import data_flags

ROOT = Path(__file__).parents[2]
DOMAINS = ("code", "prose", "dictionary")
KNOWN_TEXT = {"code": "import os\n", "prose": "The Lord", "dictionary": "[1913 Webster]"}


@pytest.fixture(scope="module")
def three_domains(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Code, prose and a dictionary as pairs, and the --data-path that the recipe prints."""
    folder = tmp_path_factory.mktemp("domains")
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "data" / "three_domains.sh"), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.splitlines()[-1].split()
    return folder, words[1 : words.index("--tokenizer-type")]


def test_the_three_domains_are_real_text_in_whole_pairs(three_domains: tuple[Path, list[str]]) -> None:
    folder, _ = three_domains
    byte = build_tokenizer("byte")
    for domain in DOMAINS:
        prefix = str(folder / f"{domain}_text_document")
        assert len(verify(prefix, None, lambda done, total: None)) == 3
        dataset = IndexedDataset(prefix)
        assert dataset.num_tokens > 10_000_000
        some = "".join(byte.decode(dataset[i].tolist()) for i in range(50, 100))
        assert KNOWN_TEXT[domain] in some


def test_a_blend_of_the_three_gives_every_domain_its_share(three_domains: tuple[Path, list[str]]) -> None:
    folder, words = three_domains
    flags = data_flags(*words, cache=folder / "cache")
    train, _, _ = build_datasets(flags, seq_length=256, seed=1, samples=(10_000, 0, 0), vocab_size=257)
    shares = [float(line.split("share ")[1].split()[0]) for line in summary_lines(flags, (train, None, None))]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=1e-4)
    for start in range(0, 10_000, 1000):  # not only in the end: all along
        counts = np.bincount(train.choices[start : start + 1000], minlength=3)
        assert np.abs(counts - [500, 300, 200]).max() <= 2


def test_a_model_learns_from_the_blend(three_domains: tuple[Path, list[str]], tmp_path: Path) -> None:
    _, words = three_domains
    flags = (
        "--layout 1+1x2+1 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --gate-bias 0 --tokenizer-type byte "
        "--micro-batch-size 16 --global-batch-size 16 --train-iters 60 --lr 3e-3 --precision fp32 --zero-stage 1 "
        "--eval-iters 4 --log-interval 10"
    )
    done = subprocess.run(
        [sys.executable, "pretrain_rgpt.py", "--data-path", *words, *flags.split(), "--save", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] > 3.9 and losses[-1] < 3.3
    assert next(record["valid_loss"] for record in reversed(records) if "valid_loss" in record) < 3.3


def recipe(name: str) -> ModuleType:
    """A script of examples/data as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "data" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stream_from_the_hub_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    hub_text = recipe("hub_text")
    texts = [f"text {i}\nwith two lines, é" for i in range(20)]
    part = tmp_path / "out.jsonl.part"
    hub_text.write(iter(texts[:7]), part, hub_text.whole_lines(part))
    with open(part, "a") as file:
        file.write('{"text": "torn')
    done = hub_text.whole_lines(part)
    assert done == 7
    hub_text.write(iter(texts[done:]), part, done)
    assert [json.loads(line)["text"] for line in part.read_text().splitlines()] == texts
