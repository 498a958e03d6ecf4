"""Groups come from one array of ranks, and DeepSpeed is told the same."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.mesh import Mesh, MeshShape, hosts_warning
from tests.ranks import RankPool


def _members(shape: MeshShape) -> dict[str, tuple[int, int, list[int]]]:
    mesh = Mesh.build(shape)
    return {
        name: (group.rank, group.size, dist.get_process_group_ranks(group.handle))
        for name, group in (
            ("tensor", mesh.tensor),
            ("data", mesh.data),
            ("pipeline", mesh.pipeline),
            ("model", mesh.model),
        )
    }


def test_tensor_ranks_are_neighbours_then_data_then_pipeline(ranks: RankPool) -> None:
    by_rank = ranks.run(_members, MeshShape(pipeline=2, data=2, tensor=2), world=8)
    assert by_rank[0] == {
        "tensor": (0, 2, [0, 1]),
        "data": (0, 2, [0, 2]),
        "pipeline": (0, 2, [0, 4]),
        "model": (0, 4, [0, 1, 4, 5]),
    }
    assert by_rank[7] == {
        "tensor": (1, 2, [6, 7]),
        "data": (1, 2, [5, 7]),
        "pipeline": (1, 2, [3, 7]),
        "model": (3, 4, [2, 3, 6, 7]),
    }


def _asked_by_deepspeed(shape: MeshShape) -> tuple[int, ...]:
    mpu = Mesh.build(shape).mpu()
    return (
        mpu.get_model_parallel_world_size(),
        mpu.get_model_parallel_rank(),
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        mpu.get_data_parallel_rank(),
    )


def test_deepspeed_hears_of_pipeline_and_tensor_as_one_model_parallel_group(ranks: RankPool) -> None:
    assert ranks.run(_asked_by_deepspeed, MeshShape(2, 1, 2), world=4) == [
        (4, 0, 2, 0, 1, 0),
        (4, 1, 2, 1, 1, 0),
        (4, 2, 2, 0, 1, 0),
        (4, 3, 2, 1, 1, 0),
    ]


def test_sizes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"--tensor-model-parallel-size 3 does not divide the 8 ranks"):
        MeshShape.of(8, tensor=3)
    assert MeshShape.of(8, tensor=2) == MeshShape(pipeline=1, data=4, tensor=2)


def test_groups_over_hosts_are_warned_of_with_the_reason() -> None:
    assert hosts_warning(tensor=4, local_world_size=8) is None
    assert "reach over the network" in hosts_warning(tensor=4, local_world_size=2)
