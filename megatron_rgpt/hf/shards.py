"""The weights of a Hugging Face folder: safetensors, sharded, with an index; read back from those, or loaded safely."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rgpt.checkpoint.layout import sync
from megatron_rgpt.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], sizes: dict[str, int], limit: int) -> None:
    """Write tensors as they come, in files of at most `limit` bytes each (a larger tensor gets a file of its own).

    `sizes` has each tensor's bytes, in the same order. No more than one file's tensors are held at a time.
    """
    shards = _split(sizes, limit)
    file_of = {}
    arriving = iter(tensors)
    for number, names in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held = dict(next(arriving) for _ in names)
        assert list(held) == names
        save_tensors(held, folder / name)
        file_of |= dict.fromkeys(names, name)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(content, indent=1) + "\n")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file to the disk. Raises `OSError`."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # the system's error, wrapped
        raise OSError(None, str(error), str(path)) from None
    # safetensors makes files for their owner alone; a model is for whoever may read its folder
    path.chmod(0o644)
    sync(path)


def _split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


class FolderTensors:
    """The tensors of a Hugging Face folder by name, read on demand. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _weight_files(folder)

    def __enter__(self) -> FolderTensors:
        with ExitStack() as stack:
            self._sources = {}
            for path in self.files:
                source = _unpickle(path) if path.name == PICKLED else stack.enter_context(_open(path))
                self._sources |= dict.fromkeys(source.keys(), source)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32. Raises `UserError` if the folder has none of this name."""
        if name not in self._sources:
            raise UserError(f"{self.folder}: no file holds the tensor {name}: the folder is incomplete")
        source = self._sources[name]
        tensor = source[name] if isinstance(source, dict) else source.get_tensor(name)
        return tensor.float()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{folder / INDEX}: not an index of shards ({error})") from None
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{folder / name} is missing, which {INDEX} names: fetch it again")
        return [folder / name for name in names]
    for name in (WEIGHTS, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
    raise UserError(f"{folder}: holds no weights ({WEIGHTS}, {INDEX} or {PICKLED}): give a Hugging Face model's folder")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}): fetch it again") from None


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError):
        raise UserError(
            f"{path}: a damaged file, or a pickle that holds more than tensors and is not loaded: get {WEIGHTS} instead"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise UserError(f"{path}: not a dictionary of tensors: get {WEIGHTS} instead")
    return content
