"""Which ranks work together: every process group comes from one array of ranks, [pipeline, data, tensor].

Tensor-parallel ranks are neighbours (they talk most, so they should share a host), then data-parallel ones. The mesh is
a value that is passed to what needs it, and it is what DeepSpeed gets as its `mpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from megatron_rgpt.errors import UserError


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the three dimensions."""

    pipeline: int
    data: int
    tensor: int

    @classmethod
    def of(cls, world_size: int, *, tensor: int = 1, pipeline: int = 1) -> MeshShape:
        """What is left for data parallelism. Raises `UserError` where the sizes do not divide the ranks."""
        if world_size % (tensor * pipeline):
            flags = f"--tensor-model-parallel-size {tensor}"
            if pipeline > 1:
                flags += f" x --pipeline-model-parallel-size {pipeline}"
            raise UserError(f"{flags} does not divide the {world_size} ranks of this run: choose a divisor")
        return cls(pipeline, world_size // (tensor * pipeline), tensor)

    def ranks(self) -> np.ndarray:
        """Global ranks by [pipeline, data, tensor] coordinate."""
        return np.arange(self.pipeline * self.data * self.tensor).reshape(self.pipeline, self.data, self.tensor)

    def table(self) -> str:
        """Ranks by pipeline stage and data-parallel coordinate; those of one cell are tensor-parallel."""
        ranks = self.ranks()
        rows = [["stage", *(f"data {data}" for data in range(self.data))]]
        rows += [
            [str(stage), *(",".join(map(str, ranks[stage, data])) for data in range(self.data))]
            for stage in range(self.pipeline)
        ]
        width = max(len(cell) for row in rows for cell in row)
        return "\n".join("  ".join(f"{cell:>{width}}" for cell in row) for row in rows)


@dataclass(frozen=True)
class Group:
    """One process group, and this process's place in it. `handle` is None where there is nobody to talk to."""

    rank: int
    size: int
    handle: dist.ProcessGroup | None = None


ALONE = Group(rank=0, size=1)


@dataclass(frozen=True)
class Mesh:
    """This rank's groups. `model` joins all ranks that together hold one copy of the model."""

    shape: MeshShape
    tensor: Group
    data: Group
    pipeline: Group
    model: Group

    @classmethod
    def build(cls, shape: MeshShape, timeout: timedelta | None = None) -> Mesh:
        """Make all groups; every rank of the default process group must call this.

        `timeout` is how long a transfer or a collective may wait for a rank. Groups do not take it from the default
        one: without it they wait for torch's own half an hour.
        """
        ranks, me = shape.ranks(), dist.get_rank()
        return cls(
            shape,
            tensor=_group_of(me, ranks.reshape(-1, shape.tensor), timeout),
            data=_group_of(me, ranks.transpose(0, 2, 1).reshape(-1, shape.data), timeout),
            pipeline=_group_of(me, ranks.transpose(1, 2, 0).reshape(-1, shape.pipeline), timeout),
            model=_group_of(me, ranks.transpose(1, 0, 2).reshape(-1, shape.pipeline * shape.tensor), timeout),
        )

    def mpu(self) -> MeshForDeepSpeed:
        return MeshForDeepSpeed(self)


def _group_of(me: int, rows: np.ndarray, timeout: timedelta | None) -> Group:
    """Make one group per row; this rank's."""
    mine = None
    for row in rows.tolist():
        handle = dist.new_group(row, timeout=timeout)
        if me in row:
            mine = Group(row.index(me), len(row), handle)
    return mine


class MeshForDeepSpeed:
    """The questions that DeepSpeed asks of an `mpu`. Its model parallelism is pipeline and tensor together."""

    def __init__(self, mesh: Mesh) -> None:
        for name, group in (
            ("model_parallel", mesh.model),
            ("tensor_model_parallel", mesh.tensor),
            ("data_parallel", mesh.data),
            ("pipeline_model_parallel", mesh.pipeline),
        ):
            setattr(self, f"get_{name}_rank", lambda group=group: group.rank)
            setattr(self, f"get_{name}_world_size", lambda group=group: group.size)
            setattr(self, f"get_{name}_group", lambda group=group: group.handle)


def hosts_warning(tensor: int, local_world_size: int) -> str | None:
    """What to say if tensor-parallel groups reach over hosts."""
    if tensor == 1 or local_world_size % tensor == 0:
        return None
    return (
        f"--tensor-model-parallel-size {tensor} does not divide the {local_world_size} ranks of a host: "
        "groups that exchange activations in every layer reach over the network; a divisor would keep them inside hosts"
    )
