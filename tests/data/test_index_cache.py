from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_rgpt.data import index_cache
from megatron_rgpt.data.index_cache import load_or_build
from megatron_rgpt.errors import UserError

FORK = multiprocessing.get_context("fork")


def load(folder: Path, build, timeout_minutes: float = 1.0, key: dict | None = None) -> dict[str, np.ndarray]:
    return load_or_build(folder, key or {"a": 1}, build, timeout_minutes=timeout_minutes, what="the test")


def lock_of(folder: Path) -> Path:
    """The lock's path, found by looking while one builds."""
    seen: list[Path] = []

    def build() -> dict[str, np.ndarray]:
        seen.extend(folder.glob("*.lock"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load(folder, build)
    return seen[0]


def test_arrays_are_built_once_and_then_mapped(tmp_path: Path) -> None:
    built = load(tmp_path, lambda: {"x": np.arange(5), "y": np.zeros((2, 3), dtype=np.int32)})
    again = load(tmp_path, lambda: pytest.fail("built twice"))
    for arrays in (built, again):
        assert arrays["x"].tolist() == [0, 1, 2, 3, 4] and arrays["y"].shape == (2, 3)
        assert not arrays["x"].flags.writeable
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    for number in range(3):
        arrays = load(tmp_path, lambda number=number: {"x": np.array([number])}, key={"n": number})
        assert arrays["x"].tolist() == [number]
    assert json.loads(next(tmp_path.glob("*/key.json")).read_text())["n"] in range(3)


def test_of_many_processes_one_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def build() -> dict[str, np.ndarray]:
        with open(log, "a") as file:
            file.write("built\n")
        return {"x": np.arange(200_000)}

    def work() -> None:
        os._exit(0 if load(tmp_path / "cache", build)["x"].sum() == np.arange(200_000).sum() else 1)

    processes = [FORK.Process(target=work) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_the_next_one_tries(tmp_path: Path) -> None:
    lock_of(tmp_path)  # whose build fails
    assert not list(tmp_path.iterdir())
    assert load(tmp_path, lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]


def test_a_dead_builders_lock_is_taken_over(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    child = FORK.Process(target=lambda: None)
    child.start()
    child.join()
    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": child.pid, "rank": "3"}))
    assert load(tmp_path, lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]
    assert not list(tmp_path.glob("*.lock*"))


def test_a_lock_of_another_host_that_lies_still_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "STILL_SECONDS", 0.0)
    lock_of(tmp_path).write_text(json.dumps({"host": "elsewhere", "pid": 1, "rank": "3"}))
    assert load(tmp_path, lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]


def test_a_deadline_says_who_was_waited_for(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.write_text(json.dumps({"host": "node7", "pid": 4242, "rank": "56"}))
    with pytest.raises(UserError, match=r"rank 56 \(process 4242 on node7.*--data-index-timeout-minutes"):
        load(tmp_path, lambda: pytest.fail("built beside another"), timeout_minutes=0.0)
    assert lock.exists()


def test_who_waits_gets_what_the_other_built(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow() -> dict[str, np.ndarray]:
        started.set()
        go_on.wait()
        return {"x": np.arange(3)}

    results: list[dict[str, np.ndarray]] = []
    first = threading.Thread(target=lambda: results.append(load(tmp_path, slow)))
    first.start()
    started.wait()
    second = threading.Thread(target=lambda: results.append(load(tmp_path, lambda: pytest.fail("built twice"))))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert [result["x"].tolist() for result in results] == [[0, 1, 2]] * 2


def test_a_builder_keeps_its_lock_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "HEARTBEAT_SECONDS", 0.001)
    beaten = threading.Event()
    touch = os.utime
    monkeypatch.setattr(os, "utime", lambda path: (touch(path), beaten.set()))

    def build() -> dict[str, np.ndarray]:
        assert beaten.wait(timeout=30)
        return {"x": np.arange(1)}

    load(tmp_path, build)


def test_a_folder_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data-cache-path"):
        load(tmp_path / "file" / "cache", lambda: {"x": np.arange(2)})


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    load(tmp_path, lambda: {"x": np.arange(1000)})
    path = next(tmp_path.glob("*/x.npy"))
    os.truncate(path, 500)
    with pytest.raises(UserError, match=r"x\.npy: damaged"):
        load(tmp_path, lambda: {"x": np.arange(2)})
