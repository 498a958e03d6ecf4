"""A checkpoint has fp32 masters whatever the run's precision, so a run may go on in another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rgpt.checkpoint.layout import find_checkpoint
from megatron_rgpt.checkpoint.save import save_checkpoint
from megatron_rgpt.config.flags import parse_invocation
from megatron_rgpt.parallel.mesh import Mesh
from megatron_rgpt.training.loop import build
from megatron_rgpt.training.prepare import prepare, resolve_config
from tests.jobs import flags, job, metrics
from tests.ranks import RankPool

PRECISIONS = ["bf16", "fp32"]


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(str(run))
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _load_and_save(argv: list[str], to: Path) -> None:
    """What an engine holds after loading, saved before any step."""
    invocation = parse_invocation(argv)
    run = prepare(resolve_config(invocation.config, dist.get_world_size()), first_rank=dist.get_rank() == 0)
    engine, tensors = build(run, Mesh.build(run.mesh_shape))
    save_checkpoint(str(to), tensors, engine.registry, engine.mesh, run.checkpoint.index, "")


@pytest.mark.parametrize(("first", "then"), [PRECISIONS, PRECISIONS[::-1]])
def test_a_run_goes_on_in_another_precision_from_its_fp32_masters(
    first: str, then: str, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    whole, run, kept = (tmp_path / name for name in ("whole", "run", "kept"))
    ranks.run(job, flags(byte_pair, f"--precision {first} --save {whole}"), world=1)
    ranks.run(job, flags(byte_pair, f"--precision {first} --save {run} --exit-interval 4"), world=1)
    masters = _tensors(run)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())

    ranks.run(_load_and_save, flags(byte_pair, f"--precision {then} --load {run}"), kept, world=2)
    again = _tensors(kept)
    assert again.keys() == masters.keys()
    assert all(torch.equal(again[name], masters[name]) for name in masters)

    ranks.run(job, flags(byte_pair, f"--precision {then} --save {run} --load {run}"), world=1)
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        assert ours["iteration"] == theirs["iteration"]
        for name in ours.keys() & {"loss", "valid_loss"}:
            # bf16 has 8 bits: the runs agree as far as those go
            assert ours[name] == pytest.approx(theirs[name], rel=2e-2)
