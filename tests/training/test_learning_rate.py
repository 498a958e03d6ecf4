"""Learning rate schedules, at the iterations where they turn."""

from __future__ import annotations

import pytest

from megatron_rgpt.config import OptimizerConfig
from megatron_rgpt.training.learning_rate import learning_rate


def rates(iterations: list[int], **changes) -> list[float]:
    config = OptimizerConfig(lr=6e-4, min_lr=6e-5, lr_warmup_iters=2000, **changes)
    return [learning_rate(config, iteration, 20000) for iteration in iterations]


def test_the_papers_cosine_rises_to_its_peak_and_ends_at_a_tenth() -> None:
    assert rates([1, 1000, 2000, 11000, 20000]) == pytest.approx([3e-7, 3e-4, 6e-4, 3.3e-4, 6e-5])


def test_linear_decay_is_straight() -> None:
    assert rates([2000, 6500, 11000, 20000], lr_decay_style="linear") == pytest.approx([6e-4, 4.65e-4, 3.3e-4, 6e-5])


def test_constant_stays_at_the_peak() -> None:
    assert rates([2001, 20000], lr_decay_style="constant") == [6e-4, 6e-4]


def test_wsd_holds_the_peak_and_falls_in_its_last_tenth() -> None:
    assert rates([2001, 18000, 19000, 20000], lr_decay_style="WSD") == pytest.approx([6e-4, 6e-4, 3.3e-4, 6e-5])
    assert rates([15999, 18000], lr_decay_style="WSD", lr_wsd_decay_iters=4000) == pytest.approx([6e-4, 3.3e-4])


def test_after_lr_decay_iters_the_rate_stays_at_its_minimum() -> None:
    assert rates([10000, 15000], lr_decay_iters=10000) == [6e-5, 6e-5]


def test_without_warm_up_the_first_iteration_is_just_under_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, lr_decay_style="linear")
    assert learning_rate(config, 1, 10) == pytest.approx(0.9)
