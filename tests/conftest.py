"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks for tests: `ranks.run(function, *args, world=2)`; see `tests/ranks.py`."""
    with RankPool(size=8) as pool:
        yield pool


@pytest.fixture(scope="session")
def byte_pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of an indexed pair of real text: this project's own sources, as bytes."""
    root = Path(__file__).parent.parent
    prefix = tmp_path_factory.mktemp("data") / "own"
    tool = [sys.executable, str(root / "tools" / "preprocess_data.py")]
    source = ["--input", str(root / "megatron_rgpt"), "--suffix", ".py"]
    target = ["--tokenizer-type", "byte", "--append-eod", "--output-prefix", str(prefix)]
    subprocess.run([*tool, *source, *target], check=True, capture_output=True)
    return f"{prefix}_text_document"
