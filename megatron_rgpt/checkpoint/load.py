"""Read a checkpoint into a run: weights, fp32 master weights and moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from megatron_rgpt.checkpoint.layout import INDEX, CheckpointIndex, verify_file
from megatron_rgpt.checkpoint.tensors import MOMENTS, EngineTensors, Kind
from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.agreement import together
from megatron_rgpt.parallel.registry import Registry


class CheckpointTensors:
    """The logical tensors of a checkpoint, read from its files on demand."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {name: handle for handle in files.values() for name in handle.keys()}  # noqa: SIM118

    def read(self, name: str, kind: Kind) -> torch.Tensor:
        key = name if kind == "weight" else f"{kind}.{name}"
        if key not in self._file_of:
            raise UserError(f"--load {self._folder}: no file holds {key}: the checkpoint is incomplete")
        return self._file_of[key].get_tensor(key)


def verify_checkpoint(folder: Path, index: CheckpointIndex) -> None:
    """Compare every file's content with its hash, the files shared out over the ranks. Collective."""
    mine = list(index.files)[dist.get_rank() :: dist.get_world_size()]

    def verify() -> None:
        for name in mine:
            verify_file(folder, name, index.files[name])

    together(verify, f"--load {folder}: cannot be read")


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
            entry.parameter.copy_(entry.padded(logical))


def load_optimizer(
    tensors: CheckpointTensors, engine_tensors: EngineTensors, registry: Registry, *, moments: bool
) -> None:
    """Set the fp32 master weights, which bf16 copies have rounded, and Adam's moments if asked."""
    for entry in registry:
        for kind in ("weight", *MOMENTS) if moments else ("weight",):
            engine_tensors.write(entry, kind, tensors.read(entry.name, kind))
