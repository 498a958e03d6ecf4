"""A checkpoint is whole or absent, and says what is wrong with it."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from megatron_rgpt.checkpoint import layout
from megatron_rgpt.checkpoint.layout import find_checkpoint, prepare_run_folder, read_index
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.errors import UserError
from tests.jobs import flags, job
from tests.ranks import RankPool


@pytest.fixture
def run(ranks: RankPool, byte_pair: str, tmp_path: Path) -> Path:
    """A run stopped after iterations 2 and 4 of 8, with a checkpoint of each."""
    folder = tmp_path / "run"
    ranks.run(job, flags(byte_pair, f"--save {folder} --save-interval 2 --exit-interval 4"), world=1)
    return folder


def go_on(ranks: RankPool, data: str, run: Path, world: int = 1) -> None:
    ranks.run(job, flags(data, f"--save {run} --load {run}"), world=world)


def test_a_truncated_file_is_named_with_both_sizes(run: Path) -> None:
    file = next((run / "iter_0000004").glob("weights*"))
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 7)
    with pytest.raises(UserError, match=rf"{file.name} has {size - 7} bytes, checkpoint.json says {size}"):
        load_model(str(run))


def test_a_missing_file_is_named(run: Path) -> None:
    file = next((run / "iter_0000004").glob("optimizer*"))
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name} is missing"):
        load_model(str(run))


def test_a_flipped_bit_is_found_before_training_goes_on(ranks: RankPool, byte_pair: str, run: Path) -> None:
    file = next((run / "iter_0000004").glob("optimizer*"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name}: content differs from its hash"):
        go_on(ranks, byte_pair, run, world=2)


def test_the_checkpoint_before_a_damaged_one_can_be_loaded_by_name(
    ranks: RankPool, byte_pair: str, run: Path, tmp_path: Path
) -> None:
    next((run / "iter_0000004").glob("weights*")).unlink()
    argv = flags(byte_pair, f"--load {run / 'iter_0000002'} --save {tmp_path / 'on'} --exit-interval 3")
    ranks.run(job, argv, world=1)
    assert (tmp_path / "on" / "latest").read_text() == "iter_0000003\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format=99), r"format 99 is newer than this version reads"),
        (lambda index: index.pop("iteration"), r"not a checkpoint index"),
        (lambda index: index.update(files=[]), r"not a checkpoint index"),
    ],
)
def test_an_index_that_is_not_ours_is_refused(run: Path, change, message: str) -> None:
    path = run / "iter_0000004" / "checkpoint.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        read_index(path.parent)


def test_a_folder_without_a_checkpoint_is_none_and_a_broken_pointer_is_an_error(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) is None
    (tmp_path / "latest").write_text("iter_0000009\n")
    with pytest.raises(UserError, match=r"latest names 'iter_0000009', which is no whole checkpoint"):
        find_checkpoint(str(tmp_path))


def _save_with_little_room(argv: list[str]) -> None:
    """A file over 40,000 bytes cannot be written by this rank: as on a full disk, an error from the system."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    job(argv)


def test_a_save_that_fails_ends_the_run_on_all_ranks_and_leaves_the_last_checkpoint(
    ranks: RankPool, byte_pair: str, run: Path
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "iter_" in str(path)}
    with pytest.raises(UserError, match=r"--save .*: checkpoint of iteration 8 could not be written.*File too large"):
        ranks.run(_save_with_little_room, flags(byte_pair, f"--save {run} --load {run}"), world=2)
    assert (run / "latest").read_text() == "iter_0000004\n"
    assert {path: path.read_bytes() for path in before} == before
    assert not list(run.glob("*.tmp"))


def test_leftovers_of_a_killed_save_do_not_stop_the_next_one(ranks: RankPool, byte_pair: str, run: Path) -> None:
    leftover = run / "iter_0000008.tmp"
    leftover.mkdir()
    (leftover / "weights-00000-of-00001.safetensors").write_bytes(b"half")
    go_on(ranks, byte_pair, run)
    assert (run / "latest").read_text() == "iter_0000008\n"
    assert not leftover.exists()
    load_model(str(run))


def test_the_pointer_moves_after_the_checkpoint_is_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.begin(tmp_path, 3)
    crashed = []

    def crash(path: Path, text: str) -> None:
        crashed.append(path.name)
        assert (tmp_path / "iter_0000003").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(layout, "write_durably", crash)
    with pytest.raises(KeyboardInterrupt):
        layout.publish(tmp_path, 3)
    assert crashed == ["latest"]


def test_a_run_is_not_saved_over_another_one(run: Path) -> None:
    with pytest.raises(UserError, match=r"holds checkpoints of a run: give --load"):
        prepare_run_folder(str(run), 10, resuming=False)
    prepare_run_folder(str(run), 10, resuming=True)


def test_a_folder_without_room_for_one_checkpoint_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GB are free and one checkpoint needs 12000000.00 GB"):
        prepare_run_folder(str(tmp_path), 10**15, resuming=False)


def test_checkpoints_can_be_read_by_everybody(run: Path) -> None:
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (run / "iter_0000004").iterdir())


def test_weights_loaded_without_ranks_are_those_that_were_trained(ranks: RankPool, byte_pair: str, run: Path) -> None:
    model, config, index = load_model(str(run))
    assert (str(config.model.layout), index.iteration) == ("1+1x3+1", 4)
    tokens = torch.arange(24)[None]
    assert torch.equal(model(tokens, exits=[3])[0], model(tokens))
