"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks for tests: `ranks.run(function, *args, world=2)`; see `tests/ranks.py`."""
    with RankPool(size=8) as pool:
        yield pool
