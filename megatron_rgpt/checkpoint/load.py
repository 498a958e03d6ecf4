"""Bring a checkpoint into a running engine: verify it, set fp32 master weights and Adam's moments."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_rgpt.checkpoint.layout import CheckpointIndex, verify_file
from megatron_rgpt.checkpoint.read import CheckpointTensors
from megatron_rgpt.checkpoint.tensors import EngineTensors
from megatron_rgpt.checkpoint.totals import MOMENTS
from megatron_rgpt.parallel.agreement import together
from megatron_rgpt.parallel.registry import Registry


def verify_checkpoint(folder: Path, index: CheckpointIndex) -> None:
    """Compare every file's content with its hash, the files shared out over the ranks. Collective."""
    mine = list(index.files)[dist.get_rank() :: dist.get_world_size()]

    def verify() -> None:
        for name in mine:
            verify_file(folder, name, index.files[name])

    together(verify, f"--load {folder}: cannot be read")


def load_optimizer(
    tensors: CheckpointTensors, engine_tensors: EngineTensors, registry: Registry, *, moments: bool
) -> None:
    """Set the fp32 master weights, which bf16 copies have rounded, and Adam's moments if asked."""
    for entry in registry:
        for kind in ("weight", *MOMENTS) if moments else ("weight",):
            engine_tensors.write(entry, kind, tensors.read(entry.name, kind))
