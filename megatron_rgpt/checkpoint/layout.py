"""What a run's folder looks like, and what makes a checkpoint in it whole.

    RUN/config.yaml                 the resolved configuration
    RUN/metrics.jsonl               what was logged
    RUN/latest                      the name of the newest checkpoint's folder
    RUN/iter_0000250/checkpoint.json    position, model, and each file's size and hash: written last
    RUN/iter_0000250/weights-00000-of-00002.safetensors      fp32, by canonical name
    RUN/iter_0000250/optimizer-00000-of-00002.safetensors    exp_avg.NAME, exp_avg_sq.NAME

A checkpoint is written under a temporary name, synced, renamed, and only then named in `latest`: whatever moment a
crash picks, `latest` names a whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rgpt.errors import UserError

FORMAT = 1
INDEX, LATEST, CONFIG = "checkpoint.json", "latest", "config.yaml"
BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments."""

_FOLDER = re.compile(r"iter_\d{7,}")


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointIndex:
    """The content of `checkpoint.json`."""

    iteration: int
    consumed_samples: int
    train_samples: int
    optimizer_steps: int
    seed: int
    depths_per_step: int
    vocab_size: int
    model: dict[str, Any]
    """The model's configuration, by field."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Logical shape of each parameter by canonical name."""
    files: dict[str, FileFacts] = field(default_factory=dict)
    format: int = FORMAT


def checkpoint_folder(run: Path, iteration: int) -> Path:
    return run / f"iter_{iteration:07d}"


def find_checkpoint(path: str) -> Path | None:
    """The checkpoint that `--load path` means: the one in this folder, or the latest of this run; None: no run yet."""
    folder = Path(path)
    if (folder / INDEX).is_file():
        return folder
    try:
        name = (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"--load {path}: {LATEST} cannot be read ({error.strerror})") from None
    if not _FOLDER.fullmatch(name) or not (folder / name / INDEX).is_file():
        raise UserError(f"--load {path}: {LATEST} names {name!r}, which is no whole checkpoint in {folder}")
    return folder / name


def prepare_run_folder(path: str, parameters: int, *, resuming: bool) -> None:
    """Check that checkpoints of this many parameters can be written to `path`, and that none would be overwritten.

    Raises `UserError` for a folder that cannot be made or written, lacks space, or holds a run not being resumed.
    """
    run = Path(path)
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_durably(run / ".writable", "")
        (run / ".writable").unlink()
        free = shutil.disk_usage(run).free
    except OSError as error:
        raise UserError(f"--save {path}: cannot be written ({error.strerror}): choose another folder") from None
    needed = parameters * BYTES_PER_PARAMETER
    if free < needed:
        raise UserError(
            f"--save {path}: {free / 1e9:.2f} GB are free and one checkpoint needs {needed / 1e9:.2f} GB: "
            "make room or choose another folder"
        )
    if not resuming and (run / LATEST).exists():
        raise UserError(
            f"--save {path} holds checkpoints of a run: give --load {path} to go on with it, or another folder"
        )


def read_index(folder: Path) -> CheckpointIndex:
    """Read and check `checkpoint.json`, and that every file it names has its size."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_text())
        if content["format"] > FORMAT:
            raise UserError(f"{path}: format {content['format']} is newer than this version reads ({FORMAT})")
        content["files"] = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        index = CheckpointIndex(**content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a checkpoint index ({error})") from None
    for name, facts in index.files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != facts.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise UserError(f"{file} {found}, {path.name} says {facts.bytes}: the checkpoint is damaged, load another")
    return index


def verify_file(folder: Path, name: str, facts: FileFacts) -> None:
    """Raise `UserError` unless the file's content has its hash."""
    if file_facts(folder / name) != facts:
        raise UserError(f"{folder / name}: content differs from its hash in {INDEX}: it is damaged, load another")


def file_facts(path: Path) -> FileFacts:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return FileFacts(path.stat().st_size, digest.hexdigest())


def begin(run: Path, iteration: int) -> Path:
    """Make the empty temporary folder of a checkpoint."""
    temporary = temporary_folder(run, iteration)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def temporary_folder(run: Path, iteration: int) -> Path:
    folder = checkpoint_folder(run, iteration)
    return folder.with_name(folder.name + ".tmp")


def publish(run: Path, iteration: int) -> Path:
    """Give a written and synced temporary folder its name, then point `latest` to it."""
    temporary, final = temporary_folder(run, iteration), checkpoint_folder(run, iteration)
    sync(temporary)
    if final.exists():
        # saved before, by a run that was then resumed from further back: replaced as a whole
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced)
    else:
        temporary.rename(final)
    sync(run)
    write_durably(run / LATEST, final.name + "\n")
    return final


def write_index(folder: Path, index: CheckpointIndex) -> None:
    write_durably(folder / INDEX, json.dumps(asdict(index), indent=1) + "\n")


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content so that a crash leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
