"""Write a checkpoint: each rank writes its share of the logical tensors, then rank 0 makes it count."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_rgpt.checkpoint import layout
from megatron_rgpt.checkpoint.layout import CheckpointIndex, FileFacts
from megatron_rgpt.checkpoint.tensors import EngineTensors
from megatron_rgpt.checkpoint.totals import Kind, key
from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.agreement import on_first_rank, together
from megatron_rgpt.parallel.mesh import Mesh
from megatron_rgpt.parallel.registry import Registry

_FILES: dict[Kind, str] = {
    "weight": "weights",
    "exp_avg": "optimizer-exp_avg",
    "exp_avg_sq": "optimizer-exp_avg_sq",
}


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
    shapes = {entry.name: list(entry.shape) for entry in registry}
    try:
        # gathered, written, hashed and synced at once: hashing after the disk is done would double the time
        with ThreadPoolExecutor(2 * len(_FILES)) as threads:
            files = [
                threads.submit(_write_file, temporary, kind, share, threads)
                for kind, share in _read_shares(tensors, registry, mesh)
                if share
            ]
            written = together(lambda: (dict(file.result() for file in files), shapes), what)

        def complete() -> Path:
            files = {name: facts for share, _ in written for name, facts in share.items()}
            all_shapes = {name: shape for _, stage in written for name, shape in stage.items()}
            layout.write_synced(temporary / layout.CONFIG, config_yaml)
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


def _read_shares(
    tensors: EngineTensors, registry: Registry, mesh: Mesh
) -> Iterator[tuple[Kind, dict[str, torch.Tensor]]]:
    """The weights and then each moment that this rank writes, by key. A stage's ranks all take part in reading."""
    owner = _owners(registry, writers=mesh.data.size * mesh.tensor.size)
    rank = mesh.data.rank * mesh.tensor.size + mesh.tensor.rank
    for kind in _FILES:
        share = {}
        for entry in registry:
            tensor = tensors.read(entry, kind)
            if owner[entry.name] == rank:
                # mostly a view of the optimizer's memory, which rests until all is written: no copy
                share[key(kind, entry.name)] = tensor.detach().to("cpu", torch.float32).contiguous()
        yield kind, share


def _write_file(
    folder: Path, kind: Kind, tensors: dict[str, torch.Tensor], threads: ThreadPoolExecutor
) -> tuple[str, FileFacts]:
    """Write a file to the disk, hashing it while the disk works; returns its name and facts."""
    path = folder / f"{_FILES[kind]}-{dist.get_rank():05d}-of-{dist.get_world_size():05d}.safetensors"
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # the system's error, wrapped
        raise OSError(None, str(error), str(path)) from None
    # safetensors makes files for their owner alone; a checkpoint is for whoever may read its folder
    path.chmod(0o644)
    synced = threads.submit(layout.sync, path)
    facts = layout.file_facts(path)
    synced.result()
    return path.name, facts
