"""tools/checkpoint.py: what is in a checkpoint, whether it is whole, how two differ; and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.checkpoint.small import a_run, change_tensors, copy, file_of, flip
from tests.ranks import RankPool
from tools import checkpoint as tool


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(ranks, tmp_path_factory.mktemp("whole"), 2, 4)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return copy(whole, tmp_path / "run")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the tool; its exit code, output and errors."""

    def command(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, argv)])
        try:
            tool.main()
            code = 0
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return command


def test_info_shows_position_model_parameters_and_files(command, run: Path) -> None:
    code, out, _ = command("info", run)
    assert code == 0
    for words in (
        "iteration          4",
        "32 of 80",
        "layout 1+1x2+1, hidden-size 8",
        "vocabulary 256",
        "weights-00000",
    ):
        assert words in out
    assert "iter_0000002, iter_0000004" in out


def test_verify_says_whole(command, run: Path) -> None:
    code, out, _ = command("verify", run)
    assert code == 0 and f"{run / 'iter_0000004'}: whole" in out


def test_verify_names_every_damaged_file_in_one_line_and_leaves_with_1(command, run: Path) -> None:
    for kind in ("weights-", "optimizer-exp_avg-"):
        flip(next((run / "iter_0000004").glob(f"{kind}*")))
    code, _, err = command("verify", run)
    assert code == 1 and err.count("\n") == 1
    assert "weights-00000" in err and "optimizer-exp_avg-00000" in err and "optimizer-exp_avg_sq-00000" not in err


def test_verify_of_a_truncated_one_leaves_with_1(command, run: Path) -> None:
    file = next((run / "iter_0000004").glob("weights*"))
    file.write_bytes(file.read_bytes()[:100])
    code, _, err = command("verify", run)
    assert code == 1 and "has 100 bytes" in err and "give --load" in err


@pytest.mark.parametrize(
    "argv", [("verify", "nowhere"), ("info", "nowhere"), ("diff", "nowhere", "nowhere"), ("tell",)]
)
def test_bad_input_is_one_line_and_2(command, argv: tuple[str, ...]) -> None:
    code, out, err = command(*argv)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_equal_checkpoints_have_no_difference(command, run: Path, whole: Path) -> None:
    code, out, _ = command("diff", run, whole)
    assert code == 0 and out.count("\n") == 1 and "tensors are equal" in out


def test_the_size_of_each_difference_is_told(command, run: Path) -> None:
    name = "embedding.tokens"
    before = load_file(file_of(run / "iter_0000004"))[name].double()

    def nudge(held: dict) -> None:
        held[name][0, 0] += 0.5

    change_tensors(nudge)(run / "iter_0000004")
    code, out, _ = command("diff", run, run / "iter_0000002")
    lines = out.splitlines()
    assert code == 1 and len(lines) == 2
    assert lines[0] == f"{name}: max |Δ| 5.000e-01  ‖Δ‖/‖·‖ {0.5 / before.norm().item():.3e}"


def test_names_that_only_one_has_are_differences(command, run: Path, ranks: RankPool, tmp_path: Path) -> None:
    longer = a_run(ranks, tmp_path / "longer", 4, layout="1+1x2+2")
    code, out, _ = command("diff", run, longer)
    assert code == 1 and f"only in {longer / 'iter_0000004'}" in out and f"only in {run}" not in out


def test_other_shapes_are_differences(command, run: Path, ranks: RankPool, tmp_path: Path) -> None:
    wider = a_run(ranks, tmp_path / "wider", 4, hidden=16)
    code, out, _ = command("diff", run, wider)
    assert code == 1 and "embedding.tokens: shapes [256, 8] and [256, 16]" in out
