"""What is in a checkpoint, whether it is whole, and how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_rgpt.checkpoint.layout import (
    INDEX,
    CheckpointIndex,
    DamagedCheckpoint,
    checkpoints,
    find_checkpoint,
    read_index,
    verify_file,
)
from megatron_rgpt.checkpoint.totals import headers
from megatron_rgpt.errors import UserError


def find(path: str) -> Path:
    """The checkpoint that a path means: a run's latest, or itself. Raises `UserError` where there is none."""
    folder = find_checkpoint(path)
    if folder is None:
        raise UserError(f"{path}: no checkpoint there (no `latest`, no {INDEX}): give a run's folder or a checkpoint's")
    return folder


def info_lines(folder: Path) -> list[str]:
    """Position, model, sizes and files, for people."""
    index = read_index(folder)
    parameters = sum(math.prod(shape) for shape in index.shapes.values())
    names = ("layout", "hidden_size", "num_attention_heads", "seq_length")
    model = ", ".join(f"{name.replace('_', '-')} {index.model[name]}" for name in names if name in index.model)
    total = sum(facts.bytes for facts in index.files.values())
    return [
        f"{folder}",
        f"  iteration          {index.iteration}",
        f"  consumed samples   {index.consumed_samples} of {index.train_samples}",
        f"  optimizer steps    {index.optimizer_steps}",
        f"  model              {model}, vocabulary {index.vocab_size}",
        f"  parameters         {parameters:,} in {len(index.shapes)} tensors",
        f"  size               {total / 1e6:,.1f} MB in {len(index.files)} files, format {index.format}",
        *(f"    {name}  {facts.bytes:,} bytes" for name, facts in index.files.items()),
        f"  in its run         {', '.join(path.name for path in reversed(checkpoints(folder.parent).values()))}",
    ]


def verify(folder: Path) -> CheckpointIndex:
    """Check sizes, names, shapes and every hash. Raises `DamagedCheckpoint` that names all files whose content is not
    theirs, and offers the last whole checkpoint."""
    index = read_index(folder)
    faults = []
    for name, facts in index.files.items():
        try:
            verify_file(folder, name, facts)
        except DamagedCheckpoint as fault:
            faults.append((name, fault))
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read ({error.strerror})") from None
    if faults:
        others = [name for name, _ in faults[1:]]
        raise DamagedCheckpoint(f"{faults[0][1]}" + (f"; damaged, too: {', '.join(others)}" if others else ""))
    return index


def differences(a: Path, b: Path) -> tuple[list[str], int]:
    """What differs between the tensors of two checkpoints, a line per tensor; and how many they have in all."""
    lines = []
    with _tensors(a) as ours, _tensors(b) as theirs:
        names = sorted(ours.keys() | theirs.keys())
        for name in names:
            if name not in theirs or name not in ours:
                lines.append(f"{name}: only in {a if name in ours else b}")
            elif (line := _difference(ours[name].get_tensor(name), theirs[name].get_tensor(name))) is not None:
                lines.append(f"{name}: {line}")
    return lines, len(names)


def _difference(a: Any, b: Any) -> str | None:
    import torch

    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if torch.equal(a, b):
        return None
    delta, norm = (a.double() - b.double()), b.double().norm().item()
    relative = delta.norm().item() / norm if norm else math.inf
    return f"max |Δ| {delta.abs().max().item():.3e}  ‖Δ‖/‖·‖ {relative:.3e}"


@contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """The open file of each tensor by name."""
    from safetensors import safe_open

    files = read_index(folder).files
    with ExitStack() as stack:
        opened = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in files}
        yield {name: opened[file] for name, (file, _, _) in headers(folder, files).items()}
