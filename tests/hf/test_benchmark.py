"""The benchmark's figure that no clock measures."""

from __future__ import annotations

import pytest

from tools.benchmark_inference import memory


def test_weights_and_caches_take_the_papers_share_of_gpt2_medium() -> None:
    # paper Table 4
    for row in memory():
        assert row["ratio"] == pytest.approx(row["expected"], abs=0.01)
