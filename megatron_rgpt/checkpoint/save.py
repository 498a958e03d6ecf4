"""Write a checkpoint: each rank writes its share of the logical tensors, then rank 0 makes it count."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_rgpt.checkpoint import layout
from megatron_rgpt.checkpoint.layout import CheckpointIndex, FileFacts
from megatron_rgpt.checkpoint.tensors import EngineTensors
from megatron_rgpt.checkpoint.totals import MOMENTS, key
from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.agreement import on_first_rank, together
from megatron_rgpt.parallel.mesh import Mesh
from megatron_rgpt.parallel.registry import Registry


def save_checkpoint(
    path: str,
    tensors: EngineTensors,
    registry: Registry,
    mesh: Mesh,
    index: CheckpointIndex,
    config_yaml: str,
    keep: int | None = None,
) -> Path:
    """Save everything a run needs to go on. Collective; on failure every rank raises the same `UserError`.

    `registry` is that of this rank's pipeline stage; `index` comes without shapes and files; `keep`: older checkpoints
    than this many whole ones are removed. Returns the folder.
    """
    run, what = Path(path), f"--save {path}: checkpoint of iteration {index.iteration} could not be written"
    temporary = layout.temporary_folder(run, index.iteration)
    on_first_rank(lambda: layout.begin(run, index.iteration), what)
    weights, moments = _read_share(tensors, registry, mesh)
    shapes = {entry.name: list(entry.shape) for entry in registry}
    try:
        written = together(lambda: (_write_share(temporary, weights=weights, optimizer=moments), shapes), what)

        def complete() -> Path:
            files = {name: facts for share, _ in written for name, facts in share.items()}
            all_shapes = {name: shape for _, stage in written for name, shape in stage.items()}
            layout.write_durably(temporary / layout.CONFIG, config_yaml)
            layout.write_index(temporary, replace(index, shapes=all_shapes, files=files))
            folder = layout.publish(run, index.iteration)
            if keep is not None:
                layout.prune(run, keep)
            return folder

        return on_first_rank(complete, what)
    except UserError:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _owners(registry: Registry, writers: int) -> dict[str, int]:
    """Which of a stage's ranks writes each parameter: the largest first, each to the rank with the least so far."""
    load = [0] * writers
    owner = {}
    for entry in sorted(registry, key=lambda entry: -entry.size):
        owner[entry.name] = load.index(min(load))
        load[owner[entry.name]] += entry.size
    return owner


def _read_share(
    tensors: EngineTensors, registry: Registry, mesh: Mesh
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights and moments that this rank writes, by key. A stage's ranks all take part in reading its tensors."""
    owner = _owners(registry, writers=mesh.data.size * mesh.tensor.size)
    rank = mesh.data.rank * mesh.tensor.size + mesh.tensor.rank
    weights, moments = {}, {}
    for entry in registry:
        for kind in ("weight", *MOMENTS):
            tensor = tensors.read(entry, kind)
            if owner[entry.name] != rank:
                continue
            share = weights if kind == "weight" else moments
            share[key(kind, entry.name)] = _copy(tensor)
    return weights, moments


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous fp32 copy on the CPU: safetensors refuses views of one memory."""
    return torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor)


def _write_share(folder: Path, **contents: dict[str, torch.Tensor]) -> dict[str, FileFacts]:
    """Write one file per named content, synced; returns their facts by file name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    facts = {}
    for kind, tensors in contents.items():
        if not tensors:
            continue
        path = folder / f"{kind}-{rank:05d}-of-{world:05d}.safetensors"
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            # the system's error, wrapped
            raise OSError(None, str(error), str(path)) from None
        # safetensors makes files for their owner alone; a checkpoint is for whoever may read its folder
        path.chmod(0o644)
        layout.sync(path)
        facts[path.name] = layout.file_facts(path)
    return facts
