"""The main job on test ranks: the path of `pretrain_rgpt.py`, without its process start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rgpt.config.flags import parse_invocation
from megatron_rgpt.parallel.notice import Notice
from megatron_rgpt.training.loop import train
from megatron_rgpt.training.prepare import prepare, resolve_config

MODEL = (
    "--layout 1+1x3+1 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --gate-bias 0 --tokenizer-type byte "
    "--micro-batch-size 2 --global-batch-size 8 --depths-per-step 2 --train-iters 8 --lr 1e-2 --lr-warmup-iters 2 "
    "--eval-interval 4 --eval-iters 1 --eval-exits all --log-interval 1 --split 80,20,0 --precision fp32"
)


def flags(data: str, more: str = "") -> list[str]:
    """Flags of a tiny run on the pair with this prefix."""
    return [*MODEL.split(), "--data-path", data, *more.split()]


def job(argv: list[str], notice: Notice | None = None) -> None:
    """Train as asked on the ranks of the default process group. Collective."""
    invocation = parse_invocation(argv)
    run = resolve_config(invocation.config, dist.get_world_size(), invocation.given)
    train(prepare(run, first_rank=dist.get_rank() == 0), "headline", notice or Notice(()))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, without the speed, which differs each time."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "tokens_per_second"} for record in records]
