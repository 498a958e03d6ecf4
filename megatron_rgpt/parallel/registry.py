"""What every parameter is: its canonical name, logical shape, first value, and whether it is decayed.

A module declares its parameters where it makes them; the registry collects the declarations of a whole model under
canonical names (the path in the model). Initial weights, optimizer groups, gradient norms, checkpoints and export read
the registry, and nothing else: no rule keys on a class name or a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_rgpt.randomness import fill_normal_, key


@dataclass(frozen=True)
class Normal:
    """First value N(0, std²)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """First value the same everywhere."""

    value: float


@dataclass(frozen=True)
class Declaration:
    """What a module says of a parameter. `rows` is the logical size of dimension 0 where the tensor is padded."""

    init: Normal | Constant
    rows: int | None = None


def declare(parameter: nn.Parameter, init: Normal | Constant, rows: int | None = None) -> nn.Parameter:
    """Attach a declaration to a parameter; returns the parameter."""
    parameter.declaration = Declaration(init, rows)
    return parameter


@dataclass(frozen=True)
class Entry:
    """One parameter of a model."""

    name: str
    parameter: nn.Parameter
    init: Normal | Constant
    shape: tuple[int, ...]
    """Logical shape: without padding, over all ranks."""
    held: tuple[int, ...]
    """Shape of the tensor that is computed with."""
    decayed: bool

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def logical(self, held: torch.Tensor) -> torch.Tensor:
        """The logical part of a tensor of this parameter's held shape (a weight, a gradient, a moment)."""
        return held.narrow(0, 0, self.shape[0]) if self.shape != self.held else held

    def padded(self, logical: torch.Tensor) -> torch.Tensor:
        """The held tensor of a logical one: padding rows are zero."""
        if self.shape == self.held:
            return logical
        return torch.cat([logical, logical.new_zeros(self.held[0] - self.shape[0], *self.shape[1:])])


class Registry:
    """The entries of a model by canonical name, in the model's order."""

    def __init__(self, model: nn.Module) -> None:
        self._entries = {name: _entry(name, parameter) for name, parameter in model.named_parameters()}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __len__(self) -> int:
        return len(self._entries)

    def initialize(self, seed: int) -> None:
        """Set every parameter to its first value, drawn on the CPU as a logical tensor keyed by its name."""
        for entry in self:
            if isinstance(entry.init, Constant):
                first = torch.full(entry.shape, entry.init.value)
            else:
                first = fill_normal_(torch.empty(entry.shape), key(seed, "init", entry.name)) * entry.init.std
            with torch.no_grad():
                entry.parameter.copy_(entry.padded(first))

    def optimizer_groups(self, weight_decay: float) -> list[dict]:
        """Parameter groups for a torch optimizer: matrices are decayed, vectors are not."""
        groups = []
        for decayed in (True, False):
            parameters = [entry.parameter for entry in self if entry.decayed is decayed]
            if parameters:
                groups.append({"params": parameters, "weight_decay": weight_decay if decayed else 0.0})
        return groups


def _entry(name: str, parameter: nn.Parameter) -> Entry:
    declaration = getattr(parameter, "declaration", None)
    if declaration is None:
        raise TypeError(f"parameter {name} was not declared: its module must call registry.declare on it")
    held = tuple(parameter.shape)
    shape = held if declaration.rows is None else (declaration.rows, *held[1:])
    return Entry(name, parameter, declaration.init, shape, held, decayed=len(shape) > 1)
