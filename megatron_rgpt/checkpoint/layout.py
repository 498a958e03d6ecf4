"""What a run's folder looks like, and what makes a checkpoint in it whole.

    RUN/config.yaml                 the resolved configuration
    RUN/metrics.jsonl               what was logged
    RUN/latest                      the name of the newest checkpoint's folder
    RUN/iter_0000250/checkpoint.json    position, model, and each file's size and hash: written last
    RUN/iter_0000250/weights-00000-of-00002.safetensors      fp32, by canonical name
    RUN/iter_0000250/optimizer-exp_avg-00000-of-00002.safetensors    exp_avg.NAME; as many of exp_avg_sq
    RUN/iter_0000500.tmp            being written or removed; of no worth
    RUN/iter_0000250.replaced       what a checkpoint being published takes the place of

A checkpoint is written under a temporary name, synced, renamed, and only then named in `latest`; what it replaces and
what it makes too many is removed after that. Whatever moment a crash picks, `latest` names a whole one.
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

from megatron_rgpt.checkpoint.foreign import seems_to_be
from megatron_rgpt.checkpoint.totals import check_totals
from megatron_rgpt.errors import UserError

FORMAT = 1
INDEX, LATEST, CONFIG = "checkpoint.json", "latest", "config.yaml"
BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments."""

_FOLDER = re.compile(r"iter_(\d{7,})")
_TEMPORARY, _REPLACED = ".tmp", ".replaced"


class DamagedCheckpoint(UserError):
    """A checkpoint of ours is not whole. The message offers the one before it."""


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
    depths_per_step: int | None
    """D; None for a dense model."""
    vocab_size: int
    model: dict[str, Any]
    """The model's configuration, by field."""
    past: dict[str, Any] = field(default_factory=dict)
    """By flag, what decided which samples the run has seen: another value would make it another run."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Logical shape of each parameter by canonical name."""
    files: dict[str, FileFacts] = field(default_factory=dict)
    format: int = FORMAT


def checkpoint_folder(run: Path, iteration: int) -> Path:
    return run / f"iter_{iteration:07d}"


def checkpoints(run: Path) -> dict[int, Path]:
    """The folders of a run that have a checkpoint's name, by iteration, the newest first."""
    found = {int(match[1]): path for path in run.glob("iter_*") if (match := _FOLDER.fullmatch(path.name))}
    return {iteration: found[iteration] for iteration in sorted(found, reverse=True) if found[iteration].is_dir()}


def find_checkpoint(path: str) -> Path | None:
    """The checkpoint that `--load path` means: the one in this folder, or the latest of this run; None: no run yet.

    Raises `UserError` for a damaged one, and for what is a checkpoint of another program.
    """
    folder = Path(path)
    if (folder / INDEX).is_file():
        return folder
    if _FOLDER.fullmatch(folder.name) and folder.is_dir() and seems_to_be(folder) is None:
        raise damaged(folder, f"--load {path}: it has no {INDEX}, so it is not whole")
    try:
        name = (folder / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        if (kind := seems_to_be(folder)) is not None:
            raise UserError(f"--load {path} seems to be {kind}") from None
        # a crash before a run's first checkpoint was named in it
        return last_whole(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--load {path}: {LATEST} cannot be read ({getattr(error, 'strerror', error)})") from None
    if _FOLDER.fullmatch(name):
        # a crash while a checkpoint took the place of the one that `latest` names
        for candidate in (folder / name, folder / (name + _REPLACED)):
            if (candidate / INDEX).is_file():
                return candidate
    elif (kind := seems_to_be(folder)) is not None:
        # DeepSpeed, too, keeps a file of this name
        raise UserError(f"--load {path} seems to be {kind}")
    raise damaged(folder / name, f"--load {path}: {LATEST} names {name!r}, which is no whole checkpoint in {folder}")


def damaged(folder: Path, fault: str) -> DamagedCheckpoint:
    """The error that says what is wrong with a checkpoint, and offers the newest whole one before it."""
    return DamagedCheckpoint(f"{fault}; {_offer(folder)}")


def _offer(folder: Path) -> str:
    match = _FOLDER.fullmatch(folder.name.removesuffix(_REPLACED))
    whole = last_whole(folder.parent, before=int(match[1]) if match else None)
    if whole is None:
        return f"no whole one comes before it in {folder.parent}: load another run"
    return f"the last whole one is {whole}: give --load {whole}"


def last_whole(run: Path, before: int | None = None) -> Path | None:
    """The newest checkpoint of a run (before an iteration) whose sizes and totals are right.

    Hashes are left to loading, which compares them all: an error should not take minutes to be said.
    """
    for iteration, folder in checkpoints(run).items():
        if (before is None or iteration < before) and is_whole(folder):
            return folder
    return None


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's index can be read, and its files have their sizes, tensors and shapes."""
    try:
        _read_index(folder)
    except (UserError, ValueError):
        return False
    return True


def check_folder_can_be_made(path: str) -> None:
    """Raise `UserError` unless `--save path` is a folder that can be written, or could be made; makes nothing."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--save {path}: {there} cannot be written: choose another folder")


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
    """Read `checkpoint.json`; check that each file has its size, and that together they hold the tensors promised.

    Raises `UserError`, which offers the last whole checkpoint where this one is not.
    """
    try:
        return _read_index(folder)
    except UserError:
        raise
    except ValueError as error:
        raise damaged(folder, str(error)) from None


def _read_index(folder: Path) -> CheckpointIndex:
    """As `read_index`; raises a bare `ValueError` for what is not whole."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_text())
        if content["format"] > FORMAT:
            raise UserError(
                f"{path}: format {content['format']} is newer than this version reads ({FORMAT}): use the version "
                f"that wrote it; {_offer(folder)}"
            )
        content["files"] = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        if any(Path(name).name != name for name in content["files"]):
            raise ValueError("it names files outside its folder")
        index = CheckpointIndex(**content)
        steps = int(index.optimizer_steps)
        shapes = {name: [int(size) for size in shape] for name, shape in index.shapes.items()}
    except UserError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a checkpoint index ({error})") from None
    for name, facts in index.files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != facts.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{file} {found}, {path.name} says {facts.bytes}: the checkpoint is damaged")
    try:
        check_totals(folder, index.files, shapes, needs_moments=steps > 0)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}: the checkpoint is damaged") from None
    return index


def verify_file(folder: Path, name: str, facts: FileFacts) -> None:
    """Raise `DamagedCheckpoint` unless the file's content has its hash."""
    if file_facts(folder / name) != facts:
        raise damaged(folder, f"{folder / name}: content differs from its hash in {INDEX}: it is damaged")


def file_facts(path: Path) -> FileFacts:
    digest = hashlib.sha256()
    # one buffer that stays in the processor's cache: half the time of reading into new ones
    buffer = memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return FileFacts(path.stat().st_size, digest.hexdigest())


def begin(run: Path, iteration: int) -> Path:
    """Clear what killed saves left, and make the empty temporary folder of a checkpoint."""
    temporary = temporary_folder(run, iteration)
    run.mkdir(parents=True, exist_ok=True)
    clear_leftovers(run)
    temporary.mkdir()
    return temporary


def clear_leftovers(run: Path) -> None:
    """Remove temporary and replaced folders; but a replaced one whose successor never came gets its name back."""
    for path in sorted(run.iterdir()):
        final = path.with_suffix("")
        if not _FOLDER.fullmatch(final.name) or path == final:
            continue
        if path.suffix == _REPLACED and not final.exists():
            path.rename(final)
        elif path.suffix in (_TEMPORARY, _REPLACED):
            # what cannot be removed now, because a reader on a network file system still has it open, is next time
            shutil.rmtree(path, ignore_errors=True)


def temporary_folder(run: Path, iteration: int) -> Path:
    folder = checkpoint_folder(run, iteration)
    return folder.with_name(folder.name + _TEMPORARY)


def publish(run: Path, iteration: int) -> Path:
    """Give a written and synced temporary folder its name, point `latest` to it, then remove what it replaces."""
    temporary, final = temporary_folder(run, iteration), checkpoint_folder(run, iteration)
    replaced = final.with_name(final.name + _REPLACED)
    sync(temporary)
    if final.exists():
        # saved before, by a run that was then resumed from further back: replaced as a whole
        final.rename(replaced)
    temporary.rename(final)
    sync(run)
    write_durably(run / LATEST, final.name + "\n")
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def prune(run: Path, keep: int) -> list[Path]:
    """Remove the checkpoints older than the `keep` newest whole ones; returns what they were called.

    Those newer than the one `latest` names, left where a run was resumed from further back, count for nothing and stay.
    """
    latest = (run / LATEST).read_text().strip()
    past = [path for path in checkpoints(run).values() if path.name == latest or _older(path.name, latest)]
    kept, removed = 0, []
    for path in past:
        if kept < keep:
            kept += is_whole(path)
            continue
        # renamed first: a crash must not leave half a checkpoint under a checkpoint's name
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            path.rename(temporary)
        except OSError:
            # the new checkpoint is safe: too many old ones are no reason to end a run
            continue
        shutil.rmtree(temporary, ignore_errors=True)
        removed.append(path)
    return removed


def _older(name: str, other: str) -> bool:
    return int(_FOLDER.fullmatch(name)[1]) < int(_FOLDER.fullmatch(other)[1])


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Write `checkpoint.json` into a temporary folder, which is synced before it gets its name."""
    write_synced(folder / INDEX, json.dumps(asdict(index), indent=1) + "\n")


def write_synced(path: Path, text: str) -> None:
    """Write a new file and flush its content to the disk; the folder's entry is left to the folder's own sync."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, text: str) -> None:
    """Replace a file's content so that a crash leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, text)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
