"""Checkpoints of a tiny model, saved by the real saver without a training engine behind it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_rgpt.checkpoint.fits import model_facts
from megatron_rgpt.checkpoint.layout import INDEX, CheckpointIndex, file_facts
from megatron_rgpt.checkpoint.save import save_checkpoint
from megatron_rgpt.config import Config, Layout
from megatron_rgpt.config.flags import to_yaml
from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import Mesh, MeshShape
from megatron_rgpt.parallel.registry import Entry
from tests.ranks import RankPool

VOCABULARY = 256
CHANGES = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod"}
"""Audit events of what a saver does to the disk."""


class _Memory:
    """Weights of a model that no engine trains, and moments that are 1 all over."""

    def read(self, entry: Entry, kind: str) -> torch.Tensor:
        return entry.parameter if kind == "weight" else torch.ones(entry.shape)


def save(run: Path, *iterations: int, keep: int | None = None, layout: str = "1+1x2+1", hidden: int = 8) -> None:
    """Save a checkpoint of each iteration. Runs on one rank."""
    config = Config().changed(
        layout=Layout.parse(layout), hidden_size=hidden, num_attention_heads=2, seq_length=8, vocab_size=VOCABULARY
    )
    _, registry = build_model(config.model, VOCABULARY, seed=1)
    mesh = Mesh.build(MeshShape.of(1))
    for iteration in iterations:
        index = CheckpointIndex(iteration, 8 * iteration, 80, iteration, 1, 1, VOCABULARY, model_facts(config.model))
        save_checkpoint(str(run), _Memory(), registry, mesh, index, to_yaml(config), keep=keep)


def save_and_die(run: Path, iteration: int, keep: int, moment: int) -> None:
    """Save, but be killed before the change of the disk of this number, from 0. Runs on one rank.

    Audit events are raised from the saver's own calls, so that none of them is replaced or known to this test.
    """
    seen = [0]

    def watch(event: str, arguments: tuple) -> None:
        if event in CHANGES and str(arguments[0]).startswith(str(run)):
            if seen[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

    sys.addaudithook(watch)
    save(run, iteration, keep=keep)


def a_run(ranks: RankPool, run: Path, *iterations: int, **options: Any) -> Path:
    """A run folder with a checkpoint of each iteration; `options` are those of `save`."""
    ranks.run(partial(save, run, *iterations, **options), world=1)
    return run


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def file_of(folder: Path, kind: str = "weights") -> Path:
    return next(folder.glob(f"{kind}-*"))


def change_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content)
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def change_tensors(change: Callable[[dict], object], kind: str = "weights") -> Callable[[Path], None]:
    """Rewrite a file with other tensors, and its size and hash in the index, so that only the totals are wrong."""

    def damage(folder: Path) -> None:
        file = file_of(folder, kind)
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        facts = vars(file_facts(file))
        change_index(lambda index: index["files"].update({file.name: facts}))(folder)

    return damage
