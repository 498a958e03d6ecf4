"""Old checkpoints go, and a saver killed at any moment never takes the last good one with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rgpt.checkpoint.inspect import find, verify
from megatron_rgpt.checkpoint.layout import prune
from tests.checkpoint.small import a_run, copy, flip, names, save, save_and_die
from tests.jobs import flags, job
from tests.ranks import RankError, RankPool


def test_a_run_keeps_the_newest_checkpoints_of_its_limit(ranks: RankPool, byte_pair: str, tmp_path: Path) -> None:
    argv = flags(byte_pair, f"--save {tmp_path} --save-interval 1 --save-total-limit 2 --exit-interval 4")
    ranks.run(job, argv, world=2)
    assert [name for name in names(tmp_path) if "iter" in name] == ["iter_0000003", "iter_0000004"]
    assert verify(find(str(tmp_path))).iteration == 4


def test_without_a_limit_all_stay(ranks: RankPool, tmp_path: Path) -> None:
    assert names(a_run(ranks, tmp_path, 1, 2, 3)) == ["iter_0000001", "iter_0000002", "iter_0000003", "latest"]


def test_damaged_checkpoints_do_not_count_so_the_last_whole_ones_stay(ranks: RankPool, tmp_path: Path) -> None:
    run = a_run(ranks, tmp_path, 1, 2, 3, 4)
    for iteration in (3, 4):
        next((run / f"iter_000000{iteration}").glob("weights*")).unlink()
    assert [path.name for path in prune(run, 1)] == ["iter_0000001"]
    assert names(run) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]


def test_what_latest_names_stays_and_what_is_newer_does_not_count(ranks: RankPool, tmp_path: Path) -> None:
    run = a_run(ranks, tmp_path, 1, 2, 3, 4)
    (run / "latest").write_text("iter_0000002\n")
    prune(run, 1)
    assert names(run) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]


def test_folders_that_are_no_checkpoints_are_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("iter_0000001.kept", "notes.tmp", "old"):
        (tmp_path / name).mkdir()
    a_run(ranks, tmp_path, 1, 2, keep=1)
    assert names(tmp_path) == ["iter_0000001.kept", "iter_0000002", "latest", "notes.tmp", "old"]


def test_leftovers_are_cleared_by_the_next_save(ranks: RankPool, tmp_path: Path) -> None:
    a_run(ranks, tmp_path, 1, 2)
    copy(tmp_path / "iter_0000001", tmp_path / "iter_0000001.replaced")
    copy(tmp_path / "iter_0000001", tmp_path / "iter_0000009.tmp")
    a_run(ranks, tmp_path, 3)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003", "latest"]


@pytest.mark.parametrize(
    ("iteration", "keep", "left"),
    [
        (6, 1, ["iter_0000007"]),
        # over the one that `latest` names, as after damage to it
        (4, 9, ["iter_0000002", "iter_0000004", "iter_0000007"]),
    ],
)
def test_a_saver_killed_at_any_moment_leaves_a_whole_latest_and_the_next_save_clears_up(
    ranks: RankPool, tmp_path: Path, iteration: int, keep: int, left: list[str]
) -> None:
    before = a_run(ranks, tmp_path / "before", 2, 4)
    reached, moment = set(), 0
    while True:
        run = copy(before, tmp_path / f"killed{moment}")
        try:
            ranks.run(save_and_die, run, iteration, keep, moment, world=1)
            break
        except RankError as death:
            assert "SIGKILL" in str(death)
        reached.add(verify(find(str(run))).iteration)
        if moment % 4 == 0 or any(run.glob("*.replaced")):
            a_run(ranks, run, 7, keep=keep)
            assert names(run) == [*left, "latest"]
            assert verify(find(str(run))).iteration == 7
        moment += 1
    # the sweep went past the moment at which the new one counts
    assert reached == {4, iteration} and moment > 12


def test_a_run_killed_before_its_first_checkpoint_was_named_goes_on_from_it(ranks: RankPool, tmp_path: Path) -> None:
    run = a_run(ranks, tmp_path, 3)
    (run / "latest").unlink()
    assert find(str(run)).name == "iter_0000003"


def test_a_run_goes_on_in_its_own_folder_from_an_older_checkpoint_than_the_damaged_latest(
    ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    ranks.run(job, flags(byte_pair, f"--save {whole}"), world=1)
    ranks.run(job, flags(byte_pair, f"--save {run} --save-interval 2 --exit-interval 4"), world=1)
    flip(next((run / "iter_0000004").glob("weights*")))
    ranks.run(job, flags(byte_pair, f"--save {run} --load {run / 'iter_0000002'} --save-interval 4"), world=1)
    assert verify(run / "iter_0000004").iteration == 4
    for file in (whole / "iter_0000008").glob("*.safetensors"):
        assert (run / "iter_0000008" / file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_saved_again_takes_the_place_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, tmp_path, 1, 1, world=1)
    assert names(tmp_path) == ["iter_0000001", "latest"]
