"""A cache of arrays on disk, built once per file system by whoever comes first.

Processes talk through the file system alone: a lock file created exclusively names its builder, the result
is made under a temporary name, synced and renamed. The others wait until it stands, up to a deadline, and
then say who they waited for. A builder touches its lock while it works; a lock that lies still is a dead
builder's and is taken over. Should two ever build at once, both make the same arrays and one rename wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_rgpt.errors import UserError

HEARTBEAT_SECONDS = 5.0
# Longer than a network file system may show an old time for.
STILL_SECONDS = 180.0
KEY_FILE = "key.json"

Arrays = dict[str, np.ndarray]
Key = dict[str, object]


def load_or_build(folder: Path, key: Key, build: Callable[[], Arrays], *, timeout_minutes: float, what: str) -> Arrays:
    """The arrays of `key`, memory-mapped from the cache; built there first if they are not.

    Args:
        folder: the cache's folder, made if needed.
        key: everything the arrays depend on, as JSON values.
        build: makes the arrays by name.
        timeout_minutes: how long to wait for another process that is building them.
        what: the thing's name for messages.

    Raises:
        UserError: the folder cannot be written, or the deadline passed.
    """
    text = json.dumps(key, sort_keys=True)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not target.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build_or_wait(target, text, build, timeout_minutes, what)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot write the index cache ({error.strerror}): "
                "give a writable folder with --data-cache-path"
            ) from None
    return {path.stem: _map(path) for path in sorted(target.glob("*.npy"))}


def _map(path: Path) -> np.ndarray:
    """A read-only view of an `.npy` file. Only its header is read, to the byte; the rest when it is used."""
    try:
        with open(path, "rb", buffering=0) as file:
            version = np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            if version != (1, 0) or os.fstat(file.fileno()).st_size != offset + dtype.itemsize * math.prod(shape):
                raise ValueError("its size is not what its header says")
        if math.prod(shape) == 0:  # an empty file cannot be mapped
            return np.empty(shape, dtype=dtype)
        # A plain view: slices of the memmap class cost several times as much.
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged index cache ({error}): delete its folder") from None


def _build_or_wait(target: Path, key: str, build: Callable[[], Arrays], timeout_minutes: float, what: str) -> None:
    lock = target.with_suffix(".lock")
    deadline = time.monotonic() + 60 * timeout_minutes
    watched: tuple[int, int] | None = None
    last_change = time.monotonic()
    pause = 0.01
    while not target.is_dir():
        if _take(lock):
            with _held(lock):
                if not target.is_dir():
                    _store(target, key, build())
            return
        beat = _beat(lock)
        if beat != watched:
            watched, last_change = beat, time.monotonic()
        elif beat is not None and (_builder_died(lock) or time.monotonic() - last_change > STILL_SECONDS):
            _break(lock)
            continue
        if time.monotonic() > deadline:
            raise UserError(
                f"{target}: waited {timeout_minutes:g} minutes for {_holder(lock)} to build the index of {what}: "
                "see whether it lives, or raise --data-index-timeout-minutes"
            )
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _take(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "rank": os.environ.get("RANK", "0")}
    with os.fdopen(descriptor, "w") as file:
        json.dump(owner, file)
    return True


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Keep the lock's time fresh while the work goes on, and remove it at the end."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.unlink(missing_ok=True)


def _store(target: Path, key: str, arrays: Arrays) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        (temporary / KEY_FILE).write_text(key)
        with contextlib.suppress(FileExistsError):
            try:
                os.rename(temporary, target)
            except OSError:
                if not target.is_dir():  # else another builder was faster: its arrays are the same
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beat(lock: Path) -> tuple[int, int] | None:
    try:
        status = lock.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _owner(lock: Path) -> dict[str, object]:
    try:
        return json.loads(lock.read_text())
    except (OSError, ValueError):  # gone, or not yet written
        return {}


def _builder_died(lock: Path) -> bool:
    """Whether the lock's owner is known to be gone: only a process of this host can be asked."""
    owner = _owner(lock)
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(str(owner["pid"])), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _break(lock: Path) -> None:
    # A rename takes exactly the file that is there; of two waiters one finds it gone.
    stale = lock.with_name(f"{lock.name}.{uuid.uuid4().hex}.stale")
    with contextlib.suppress(FileNotFoundError):
        os.rename(lock, stale)
        stale.unlink()


def _holder(lock: Path) -> str:
    owner = _owner(lock)
    if not owner:
        return f"the holder of {lock}"
    return f"rank {owner['rank']} (process {owner['pid']} on {owner['host']}, {lock})"
