"""Adaptive exit: each token loops until it stands still, and what has left is not computed. Part of an exported model.

A token leaves after the first step whose change is below the threshold. Later steps run on the tokens still in the
loop alone, gathered into smaller tensors; those see the keys and values of the tokens that left as their last step
wrote them, in a prefill as in decoding, so that both give the same.

Shapes: B batch, N tokens of this forward, D hidden size, T slots; R rows with tokens in the loop, A tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .cache_recurrent_gpt import Place, RecurrentCache

Terms = tuple[torch.Tensor, ...]
Recur = Callable[[torch.Tensor, Terms, torch.Tensor | None, RecurrentCache, Place], torch.Tensor]
Leave = Callable[[torch.Tensor, torch.Tensor | None, RecurrentCache, Place], torch.Tensor]


class StateChange:
    """‖h_k - h_(k-1)‖ / ‖h_(k-1)‖ of each token."""

    def __call__(
        self, before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache, place: Place
    ) -> torch.Tensor:
        before, after = before.float(), after.float()
        return (after - before).norm(dim=-1) / before.norm(dim=-1)


class ExitDivergence:
    """KL(p_k ‖ p_(k-1)) of each token, nats, between what it would say leaving after step k and one step before.

    Each measurement costs the coda and the head on the tokens in the loop.
    """

    def __init__(
        self, leave: Leave, h_pre_BND: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache, place: Place
    ):
        self._leave = leave
        self._last_BNV = leave(h_pre_BND, mask, cache, place).float().log_softmax(-1)

    def __call__(
        self, before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache, place: Place
    ) -> torch.Tensor:
        new = self._leave(after, mask, cache, place).float().log_softmax(-1)
        at = (place.rows_R1, place.columns_RA) if place.packed else slice(None)
        divergence = (new.exp() * (new - self._last_BNV[at])).sum(-1)
        self._last_BNV[at] = new
        return divergence


def loop_until_still(
    recur: Recur,
    change: StateChange | ExitDivergence,
    h_BND: torch.Tensor,
    terms: Terms,
    mask: torch.Tensor | None,
    cache: RecurrentCache,
    place: Place,
    real_BN: torch.Tensor,
    threshold: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states that tokens leave with [B, N, D], and after how many steps [B, N] (0 for padding).

    At most the cache's `num_recurrences` steps; at least one.
    """
    active_BN, steps_BN = real_BN.clone(), torch.zeros_like(real_BN, dtype=torch.long)
    h_BND = h_BND.clone()
    step = 0
    while step < cache.num_recurrences and bool(active_BN.any()):
        step += 1
        steps_BN += active_BN
        if step == 1 or bool(active_BN.all()):
            here = replace(place, step=step)
            after_BND = recur(h_BND, terms, mask, cache, here)
            active_BN &= change(h_BND, after_BND, mask, cache, here) >= threshold
            h_BND = after_BND
            continue
        cache.carry(step, place)
        here = replace(_pack(active_BN, place), step=step)
        at = (here.rows_R1, here.columns_RA)
        packed_mask = None if mask is None else mask[at[0], 0, at[1]].unsqueeze(1)
        before_RAD = h_BND[at]
        after_RAD = recur(before_RAD, tuple(term[at] for term in terms), packed_mask, cache, here)
        active_BN[at] = change(before_RAD, after_RAD, packed_mask, cache, here) >= threshold
        h_BND[at] = after_RAD
    for later in range(step + 1, cache.num_recurrences + 1):
        cache.carry(later, place)
    return h_BND, steps_BN


def _pack(active_BN: torch.Tensor, place: Place) -> Place:
    """The tokens in the loop: rows that have any, and A columns for each, its first one again where it has fewer."""
    rows_R = active_BN.any(1).nonzero()[:, 0]
    active_RN = active_BN[rows_R]
    counts_R1 = active_RN.sum(1, keepdim=True)
    first_RA = active_RN.long().argsort(dim=1, descending=True, stable=True)[:, : int(counts_R1.max())]
    numbers_A = torch.arange(first_RA.shape[1], device=first_RA.device)
    columns_RA = torch.where(numbers_A < counts_R1, first_RA, first_RA[:, :1])
    return replace(place, rows_R1=rows_R[:, None], columns_RA=columns_RA)
