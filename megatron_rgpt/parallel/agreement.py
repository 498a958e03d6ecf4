"""Ranks that succeed or fail together: an error on one becomes the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_rgpt.errors import UserError

Result = TypeVar("Result")


def together(work: Callable[[], Result], what: str) -> list[Result]:
    """Run `work` on every rank and return all results by rank.

    If it raises `OSError` or `UserError` anywhere, every rank raises a `UserError` with the first rank's message, so
    that none waits for one that has left. `what` says what was tried, naming the flag.
    """
    result, failure = None, None
    try:
        result = work()
    except UserError as error:
        failure = str(error)
    except OSError as error:
        failure = f"{what}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, failure))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise UserError(message if rank == 0 else f"{message} [rank {rank}]")
    return [value for value, _ in outcomes]


def on_first_rank(work: Callable[[], Result], what: str) -> Result:
    """As `together`, but only rank 0 works; every rank gets its result."""
    return together(lambda: work() if dist.get_rank() == 0 else None, what)[0]
