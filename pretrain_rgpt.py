#!/usr/bin/env python
"""Pretrain a recurrent-depth transformer: read the configuration, find this rank's place, hand over to training."""

from __future__ import annotations

import json
import os
import sys

from megatron_rgpt.config.flags import parse_invocation
from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.parallel.launch import resolve, start
from megatron_rgpt.parallel.notice import Notice


def main() -> None:
    # First: a scheduler's signal may come while torch is still being imported.
    notice = Notice()
    with exit_on_user_error():
        placement = resolve(os.environ)
    # All ranks see the same flags: one of them complains.
    with exit_on_user_error(quiet=placement.rank > 0):
        invocation = parse_invocation(sys.argv[1:])
        # Late: torch and DeepSpeed take seconds to import, a mistyped flag should not.
        from megatron_rgpt.training.plan import describe, describe_as_text, layout_warnings
        from megatron_rgpt.training.prepare import check_complete, check_inputs, prepare, resolve_config

        ranks = invocation.world_size or placement.world_size
        resolved = resolve_config(invocation.config, ranks, invocation.given)
        if not invocation.dry_run:
            check_complete(resolved)
    # Ranks of one host see the same files: one of them complains.
    with exit_on_user_error(quiet=placement.local_rank > 0):
        if invocation.dry_run:
            facts = {**describe(resolved), "data": check_inputs(resolved)}
            print(json.dumps(facts, indent=1) if invocation.json else describe_as_text(facts))
            return
        run = prepare(resolved, first_rank=placement.rank == 0)
        ranks_table = start(placement, run.config.parallel.distributed_timeout_minutes)

        from megatron_rgpt.training.loop import train

        warnings = layout_warnings(run, placement.local_world_size)
        train(run, "\n".join([ranks_table, run.mesh_shape.table(), describe_as_text(describe(run)), *warnings]), notice)


if __name__ == "__main__":
    main()
