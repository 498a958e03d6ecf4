"""Random numbers are functions of what they are for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_rgpt.randomness import Noise, fill_normal_, key, step_depths


def test_keys_differ_by_seed_purpose_and_number() -> None:
    keys = {
        key(seed, purpose, ordinal, step)
        for seed in (1, 2)
        for purpose in ("state_noise", "gate_noise")
        for ordinal in range(20)
        for step in range(20)
    }
    assert len(keys) == 2 * 2 * 20 * 20


def test_a_draw_is_the_same_whatever_was_drawn_before() -> None:
    first = fill_normal_(torch.empty(5, 7), key(1, "init", "a"))
    torch.manual_seed(0)
    torch.randn(100)
    fill_normal_(torch.empty(9), key(1, "init", "b"))
    assert torch.equal(first, fill_normal_(torch.empty(5, 7), key(1, "init", "a")))


def test_noise_is_standard_normal_and_of_its_own_for_each_step_purpose_and_sample() -> None:
    noise = Noise(seed=1, ordinals=(0, 1))
    like = torch.empty(64, 2, 32)
    draws = [noise.draw_sBD(purpose, step, like)[:, row] for purpose in ("a", "b") for step in (1, 2) for row in (0, 1)]
    flat = torch.stack([draw.flatten() for draw in draws])
    assert flat.mean().abs() < 0.02 and abs(flat.std() - 1) < 0.02
    correlations = torch.corrcoef(flat) - torch.eye(len(draws))
    assert correlations.abs().max() < 0.1


def test_noise_in_fp64_is_the_fp32_draw() -> None:
    noise = Noise(seed=1, ordinals=(4,))
    single, double = (noise.draw_sBD("a", 1, torch.empty(8, 1, 4, dtype=d)) for d in (torch.float32, torch.float64))
    assert torch.equal(single.double(), double)


def test_noise_for_another_number_of_samples_than_ordinals_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 samples, 2 ordinals"):
        Noise(seed=1, ordinals=(0, 1)).draw_sBD("a", 1, torch.empty(4, 3, 2))


@pytest.mark.parametrize("sampling", ["uniform", "stratified"])
def test_each_depth_group_draws_uniformly_from_r_min_to_r(sampling: str) -> None:
    counts = [Counter(), Counter(), Counter()]
    steps = 3000
    for step in range(steps):
        depths = step_depths(5, step * 6, sampling=sampling, groups=3, smallest=2, largest=6)
        for group, depth in enumerate(depths):
            counts[group][depth] += 1
    for count in counts:
        assert sorted(count) == [2, 3, 4, 5, 6]
        # 5 standard deviations of a fair draw
        assert all(abs(n - steps / 5) < 5 * (steps * 0.2 * 0.8) ** 0.5 for n in count.values())


@pytest.mark.parametrize("groups", [1, 3, 4, 6, 11])
def test_stratified_depths_are_dealt_as_equally_as_a_step_allows(groups: int) -> None:
    for step in range(50):
        counts = Counter(step_depths(5, step, sampling="stratified", groups=groups, smallest=1, largest=4))
        dealt = [counts[depth] for depth in range(1, 5)]
        assert max(dealt) - min(dealt) <= 1 and sum(dealt) == groups


def test_stratified_depths_come_in_a_different_order_each_step() -> None:
    orders = {tuple(step_depths(5, s, sampling="stratified", groups=4, smallest=1, largest=4)) for s in range(60)}
    assert len(orders) > 20


def test_fixed_depth_is_always_r() -> None:
    assert step_depths(5, 0, sampling="fixed", groups=3, smallest=1, largest=7) == [7, 7, 7]
