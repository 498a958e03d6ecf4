"""Read the logical tensors of a checkpoint, and a model from it. Needs no process group and no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rgpt.checkpoint.layout import CONFIG, INDEX, CheckpointIndex, find_checkpoint, read_index
from megatron_rgpt.checkpoint.totals import Kind, key
from megatron_rgpt.config import Config
from megatron_rgpt.config.flags import read_yaml
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.recurrent import RecurrentTransformer, build_model
from megatron_rgpt.parallel.registry import Registry


class CheckpointTensors:
    """The logical tensors of a checkpoint, read from its files on demand."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {name: handle for handle in files.values() for name in handle.keys()}  # noqa: SIM118

    def read(self, name: str, kind: Kind) -> torch.Tensor:
        """The logical fp32 tensor of a parameter: its `weight`, or a moment of it."""
        wanted = key(kind, name)
        if wanted not in self._file_of:
            raise UserError(
                f"--load {self._folder}: no file holds {wanted}: it was imported or is another model's: give --finetune"
            )
        return self._file_of[wanted].get_tensor(wanted)


@contextmanager
def open_checkpoint(folder: Path, index: CheckpointIndex) -> Iterator[CheckpointTensors]:
    """Open a checkpoint's files for reading tensors."""
    with ExitStack() as stack:
        files = {}
        for name in index.files:
            try:
                files[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder / name}: not a safetensors file ({error})") from None
        yield CheckpointTensors(folder, files)


def load_weights(tensors: CheckpointTensors, registry: Registry) -> None:
    """Set the model's weights. Call before the engine is built, so that its low-precision copies follow."""
    for entry in registry:
        logical = tensors.read(entry.name, "weight")
        if tuple(logical.shape) != entry.shape:
            raise UserError(
                f"{INDEX}: {entry.name} has shape {list(logical.shape)}, the model's is {list(entry.shape)}"
            )
        with torch.no_grad():
            entry.parameter.copy_(entry.take(logical))


def load_model(path: str) -> tuple[RecurrentTransformer, Config, CheckpointIndex]:
    """The fp32 model of a checkpoint, or of a run's latest one, in evaluation mode, and how it was made."""
    folder = find_checkpoint(path)
    if folder is None:
        raise UserError(f"{path}: no checkpoint there (no `latest`, no {INDEX}): check the folder")
    index = read_index(folder)
    config = Config().changed(**read_yaml(str(folder / CONFIG)))
    model, registry = build_model(config.model, index.vocab_size, index.seed)
    with open_checkpoint(folder, index) as tensors:
        load_weights(tensors, registry)
    return model.eval(), config, index
