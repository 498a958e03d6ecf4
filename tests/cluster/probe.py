"""What a launcher gave each rank: joins the group, adds up the ranks, prints the table and each placement.

usage: <launcher> tests/cluster/probe.py [--fail RANK | --hang]     (--fail: that rank leaves with exit code 3)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

# By path, since launchers start it on machines where the package need not be installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.parallel.launch import resolve, start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=int)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--local_rank", type=int, help="added by the deepspeed launcher; resolve knows")
    arguments = parser.parse_args()
    placement = resolve(os.environ)
    table = start(placement, timeout_minutes=1)

    import torch
    import torch.distributed as dist

    total = torch.tensor(placement.rank)
    dist.all_reduce(total)
    assert total.item() == sum(range(placement.world_size))
    print(placement, flush=True)
    if placement.rank == 0:
        print(table, flush=True)
    if arguments.fail == placement.rank:
        os._exit(3)
    if arguments.hang:
        print(f"rank {placement.rank} hangs as process {os.getpid()}", flush=True)
        signal.pause()
    dist.barrier()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
