"""What is no whole checkpoint of ours is refused in a line that says what it is and what to do; never unpickled."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_rgpt.checkpoint.inspect import find, verify
from megatron_rgpt.checkpoint.layout import INDEX, DamagedCheckpoint, find_checkpoint
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.errors import UserError
from tests.checkpoint.small import a_run, change_index, change_tensors, copy, file_of, flip
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iterations 2 and 4."""
    return a_run(ranks, tmp_path_factory.mktemp("whole"), 2, 4)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return copy(whole, tmp_path / "run")


def _truncate(folder: Path) -> None:
    file = file_of(folder)
    file.write_bytes(file.read_bytes()[:-9])


def _without_moments(folder: Path) -> None:
    for kind in ("exp_avg", "exp_avg_sq"):
        file = file_of(folder, f"optimizer-{kind}")
        file.unlink()
        change_index(lambda index, name=file.name: index["files"].pop(name))(folder)


def _any(tensors: dict) -> str:
    return sorted(tensors)[0]


DAMAGES = {
    "a truncated file": (_truncate, r"weights-.* has \d+ bytes, checkpoint.json says \d+"),
    "a missing shard": (lambda folder: file_of(folder, "optimizer").unlink(), r"optimizer-.* is missing"),
    "a missing index": (lambda folder: (folder / INDEX).unlink(), r"no whole checkpoint"),
    "an empty index": (lambda folder: (folder / INDEX).write_text(""), r"not a checkpoint index"),
    "an index of bytes": (lambda folder: (folder / INDEX).write_bytes(b"\xff\x00"), r"not a checkpoint index"),
    "an index without shapes": (change_index(lambda index: index.update(shapes=[])), r"not a checkpoint index"),
    "files outside": (
        change_index(lambda index: index["files"].update({"../x": {"bytes": 1, "sha256": ""}})),
        r"files outside its folder",
    ),
    "a newer version": (change_index(lambda index: index.update(format=9)), r"format 9 is newer .* reads \(1\)"),
    "a missing folder": (lambda folder: folder.rename(folder.with_name("gone")), r"no whole checkpoint"),
    "a missing tensor": (change_tensors(lambda held: held.pop(_any(held))), r"no file holds "),
    "a tensor too many": (change_tensors(lambda held: held.update(x=torch.ones(1))), r"holds x, which the index"),
    "another shape": (
        change_tensors(lambda held: held.update({_any(held): torch.ones(3, 5)})),
        r"is F32 \[3, 5\], the index says F32 \[",
    ),
    "another type": (
        change_tensors(lambda held: held.update({_any(held): held[_any(held)].bfloat16()})),
        r"is BF16 .*, the index says F32",
    ),
    "a moment too few": (
        change_tensors(lambda held: held.pop(_any(held)), "optimizer-exp_avg_sq"),
        "no file holds exp",
    ),
    "no moments after steps": (_without_moments, r"no file holds exp_avg\."),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_is_refused_and_the_one_before_it_offered(damage: str, run: Path) -> None:
    change, words = DAMAGES[damage]
    change(run / "iter_0000004")
    before = run / "iter_0000002"
    with pytest.raises(UserError, match=words) as error:
        load_model(str(run))
    line = str(error.value)
    assert "\n" not in line and line.endswith(f"; the last whole one is {before}: give --load {before}")
    load_model(str(before))


@pytest.mark.parametrize("kind", ["weights", "optimizer-exp_avg", "optimizer-exp_avg_sq"])
def test_a_flipped_bit_is_found_by_its_hash_and_the_one_before_offered(kind: str, run: Path) -> None:
    flip(file_of(run / "iter_0000004", kind))
    with pytest.raises(DamagedCheckpoint, match=rf"{kind}-.*content differs .* give --load {run / 'iter_0000002'}$"):
        verify(find(str(run)))


def test_a_flipped_bit_of_a_header_is_found_without_hashes(run: Path) -> None:
    flip(file_of(run / "iter_0000004"), at=8)
    with pytest.raises(DamagedCheckpoint, match=r"not a whole safetensors file.* give --load"):
        load_model(str(run))


def test_a_damaged_one_is_never_offered(run: Path) -> None:
    _truncate(run / "iter_0000004")
    _truncate(run / "iter_0000002")
    with pytest.raises(DamagedCheckpoint, match=rf"no whole one comes before it in {run}: load another run"):
        load_model(str(run))


def test_a_checkpoint_named_without_its_index_is_refused(run: Path) -> None:
    (run / "iter_0000004" / INDEX).unlink()
    with pytest.raises(
        DamagedCheckpoint, match=r"iter_0000004: it has no checkpoint.json.* give --load .*iter_0000002"
    ):
        find_checkpoint(str(run / "iter_0000004"))


class _Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def _hugging_face(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def _deepspeed(folder: Path) -> Path:
    (folder / "latest").write_text("global_step10")
    (folder / "global_step10").mkdir()
    (folder / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"")
    return folder


def _megatron(folder: Path) -> Path:
    (folder / "latest_checkpointed_iteration.txt").write_text("200")
    (folder / "iter_0000200" / "mp_rank_00").mkdir(parents=True)
    return folder


def _distributed(folder: Path) -> Path:
    (folder / "__0_0.distcp").write_bytes(b"")
    return folder


def _torch_file(folder: Path) -> Path:
    torch.save(_Trap(folder / "sprung"), folder / "model.pt")
    return folder / "model.pt"


def _bare_pickle(folder: Path) -> Path:
    (folder / "model.pkl").write_bytes(pickle.dumps(_Trap(folder / "sprung")))
    return folder / "model.pkl"


def _pickles(folder: Path) -> Path:
    return _torch_file(folder).parent


def _text(folder: Path) -> Path:
    (folder / "notes").write_text("none")
    return folder / "notes"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_hugging_face, r"a Hugging Face folder: tools/checkpoint_convert.py import --load PATH --save RUN"),
        (_deepspeed, r"a DeepSpeed checkpoint, .*tools/checkpoint_convert.py"),
        (_megatron, r"a Megatron-LM checkpoint: .*tools/checkpoint_convert.py"),
        (_distributed, r"a torch.distributed.checkpoint folder: "),
        (_torch_file, r"a torch pickle, which is not loaded"),
        (_bare_pickle, r"a torch pickle, which is not loaded"),
        (_pickles, r"a folder of torch pickles \(model.pt\), which are not loaded"),
        (_text, r"a file: give a run's folder"),
    ],
)
def test_a_checkpoint_of_another_program_is_told_what_it_seems_to_be(
    make: Callable, words: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    expected = f"--load {re.escape(str(path))} seems to be " + words.replace("PATH", re.escape(str(path)))
    with pytest.raises(UserError, match=expected) as error:
        find_checkpoint(str(path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "sprung").exists()
