"""Do a checkpoint's files hold the tensors that its index promises? Reads the files' headers alone, so it is cheap."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
_DTYPE = "F32"


def key(kind: Kind, name: str) -> str:
    """What a file calls the weight, or a moment, of a parameter."""
    return name if kind == "weight" else f"{kind}.{name}"


def headers(folder: Path, files: Iterable[str]) -> dict[str, tuple[str, str, list[int]]]:
    """Of each tensor in these files: the file, its type and its shape.

    Raises `ValueError` for a file that is not a whole safetensors file, and for a name that two of them hold.
    """
    found: dict[str, tuple[str, str, list[int]]] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name in found:
                        raise ValueError(f"{found[name][0]} and {file} both hold {name}")
                    tensor = tensors.get_slice(name)
                    found[name] = (file, tensor.get_dtype(), tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error})") from None
    return found


def check_totals(
    folder: Path, files: Iterable[str], shapes: dict[str, list[int]], *, needs_moments: bool
) -> dict[str, tuple[str, str, list[int]]]:
    """Raise `ValueError` unless the files hold a weight of each shape, both moments of each or of none, and no more.

    `needs_moments`: "none" is not good enough, because the optimizer has taken steps. Returns the headers.
    """
    found = headers(folder, files)
    expected = dict(shapes)
    if needs_moments or any(key(kind, name) in found for kind in MOMENTS for name in shapes):
        expected |= {key(kind, name): shape for kind in MOMENTS for name, shape in shapes.items()}
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"no file holds {name}")
        file, dtype, its_shape = found[name]
        if its_shape != list(shape) or dtype != _DTYPE:
            raise ValueError(f"{file}: {name} is {dtype} {its_shape}, the index says {_DTYPE} {list(shape)}")
    for name in found.keys() - expected.keys():
        raise ValueError(f"{found[name][0]} holds {name}, which the index does not know")
    return found
