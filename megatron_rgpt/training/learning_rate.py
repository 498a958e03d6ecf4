"""The learning rate, a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_rgpt.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """Rate of `iteration`, counted from 1.

    Warm-up rises linearly and reaches `lr` at iteration `lr_warmup_iters`. The decay then ends at `min_lr` at
    iteration `lr_decay_iters` (default: the last) and stays there. WSD holds `lr` until its last
    `lr_wsd_decay_iters` (default: a tenth of the run), which fall linearly.
    """
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if iteration >= end:
        return config.min_lr
    if config.lr_decay_style == "WSD":
        # not before the warm-up has ended
        length = min(config.lr_wsd_decay_iters or max(1, end // 10), end - warmup)
        remaining = min(1.0, (end - iteration) / length)
    else:
        remaining = (end - iteration) / (end - warmup)
        if config.lr_decay_style == "cosine":
            remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.min_lr + remaining * (config.lr - config.min_lr)
