"""`tools/generate.py` and `tools/exit_table.py`: the same text from a run and from its export, cached or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.hf.inference import open_model
from megatron_rgpt.model.generate import generate, next_logits
from tests.jobs import flags, job
from tests.ranks import RankPool
from tools import exit_table
from tools import generate as tool

PROMPT = "def read_"


@pytest.fixture(scope="module")
def run(ranks: RankPool, byte_pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    ranks.run(job, flags(byte_pair, f"--save {folder}"), world=1)
    return folder


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's Hugging Face folder, made without the check of a whole export."""
    from megatron_rgpt.hf.in_memory import transformers_model
    from megatron_rgpt.hf.tokenizer_files import run_tokenizer, write_tokenizer

    model, config, _ = load_model(str(run))
    target = tmp_path_factory.mktemp("exports") / "model"
    made = transformers_model(model)
    made.save_pretrained(target)
    write_tokenizer(run_tokenizer(config.data), target, config.model.seq_length)
    return target


def said(main, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    monkeypatch.setattr(sys, "argv", ["tool", *argv])
    main()
    return capsys.readouterr().out


def complaint(main, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as left:
        said(main, argv, monkeypatch, capsys)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("depth", [None, 1, 0])
def test_cached_text_is_the_uncached_text_even_beyond_the_context(run: Path, depth: int | None) -> None:
    model, _, _ = load_model(str(run))
    speaker = open_model(str(run))
    assert speaker.cached
    # the context is 24 tokens
    prompt, options = speaker.encode(PROMPT), {} if depth is None else {"num_recurrences": depth}
    uncached = generate(next_logits(model, depth), prompt, 30, seed=5)
    assert generate(speaker.next_logits(options), prompt, 30, seed=5) == uncached


def test_a_run_and_its_export_say_the_same(run: Path, folder: Path, monkeypatch, capsys) -> None:
    flags = ["--prompt", PROMPT, "import ", "--new-tokens", "12", "--seed", "3"]
    texts = [said(tool.main, ["--load", str(load), *flags], monkeypatch, capsys) for load in (run, folder)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(PROMPT) and "\nimport " in texts[0] and len(texts[0]) > len(PROMPT) + 12
    shared = said(tool.main, ["--load", str(run), *flags, "--kv-sharing", "last"], monkeypatch, capsys)
    assert shared.startswith(PROMPT)


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_exits_are_shown_as_text_and_picture(kind: str, request, tmp_path: Path, monkeypatch, capsys) -> None:
    load, picture = request.getfixturevalue(kind), tmp_path / "exits.png"
    run = request.getfixturevalue("run")
    argv = ["--load", str(load), "--prompt", PROMPT, "class ", "--answer", "f", "M", "--show-exits", str(picture)]
    lines = said(tool.main, argv, monkeypatch, capsys).splitlines()
    model, _, _ = load_model(str(run))
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        chances = model(tokens, exits=range(4))[:, 0, -1].softmax(-1)[:, ord("f")]
    assert lines[0] == f"{PROMPT!r} -> 'f'"
    assert [float(line.split()[1]) for line in lines[2:6]] == pytest.approx(chances.tolist(), abs=2e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_of_loss_against_steps(run: Path, byte_pair: str, monkeypatch, capsys) -> None:
    argv = ["--load", str(run), "--data-path", byte_pair, "--samples", "8", "--thresholds", "1e9", "1e-9"]
    lines = said(exit_table.main, argv, monkeypatch, capsys).splitlines()
    rows = {line[:20].strip(): tuple(map(float, line[20:].split())) for line in lines[2:]}
    assert [rows[f"fixed {k}"][0] for k in range(4)] == [0, 1, 2, 3]
    assert rows["state < 1e+09"] == rows["fixed 1"] and rows["state < 1e-09"] == rows["fixed 3"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--load", "nowhere", "--prompt", "a"], ["--load nowhere", "neither a run or checkpoint"]),
        (["--load", "RUN", "--prompt", ""], ["--prompt is empty"]),
        (["--load", "RUN", "--prompt", "a", "--num-recurrences", "-1"], ["--num-recurrences -1"]),
        (["--load", "RUN", "--prompt", "a", "--temperature", "-1"], ["--temperature -1"]),
        (["--load", "RUN", "--prompt", "a", "--new-tokens", "0"], ["--new-tokens"]),
        (["--load", "RUN", "--prompt", "a", "--answer", "b", "c", "--show-exits"], ["--answer has 2 texts"]),
    ],
)
def test_bad_flags_are_one_line(argv: list[str], words: list[str], run: Path, monkeypatch, capsys) -> None:
    error = complaint(tool.main, [str(run) if word == "RUN" else word for word in argv], monkeypatch, capsys)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error
