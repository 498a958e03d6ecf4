"""What every parameter is: its canonical name, logical shape, the slice this rank holds, its first value, its decay.

A module declares its parameters where it makes them; the registry collects the declarations of a whole model under
canonical names (the path in the model). Initial weights, optimizer groups, tensor-parallel sums, gradient norms,
checkpoints and export read the registry, and nothing else: no rule keys on a class name or a pattern.

A parameter is either sharded over tensor-parallel ranks, or replicated; since TP is always sequence-parallel, every
replicated parameter sees a shard of the sequence, and its gradient on one rank is a part of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_rgpt.parallel.mesh import ALONE, Group
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
class Shard:
    """Dimension `dim` is cut over tensor-parallel ranks; of `parts` equal parts of it, each is cut by itself."""

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Declaration:
    """What a module says of a parameter. `rows` is the logical size of dimension 0 where the tensor is padded."""

    init: Normal | Constant
    shard: Shard | None = None
    rows: int | None = None


def declare(
    parameter: nn.Parameter, init: Normal | Constant, *, shard: Shard | None = None, rows: int | None = None
) -> nn.Parameter:
    """Attach a declaration to a parameter; returns the parameter."""
    parameter.declaration = Declaration(init, shard, rows)
    return parameter


@dataclass(frozen=True)
class Entry:
    """One parameter of a model, as this rank holds it."""

    name: str
    parameter: nn.Parameter
    init: Normal | Constant
    shard: Shard | None
    tp: Group
    held: tuple[int, ...]
    """Shape of the tensor on this rank."""
    padded: tuple[int, ...]
    """Shape over all ranks, with the padding of the vocabulary."""
    shape: tuple[int, ...]
    """Logical shape: over all ranks, without padding."""
    decayed: bool

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different slices; else they hold equal copies with partial gradients."""
        return self.shard is not None and self.tp.size > 1

    def take(self, logical: torch.Tensor) -> torch.Tensor:
        """This rank's tensor of a logical one; padding rows are zero."""
        if self.shape != self.padded:
            padding = logical.new_zeros(self.padded[0] - self.shape[0], *self.shape[1:])
            logical = torch.cat([logical, padding])
        return self._slice(logical).reshape(self.held) if self.sharded else logical

    def put(self, held: torch.Tensor) -> torch.Tensor:
        """The logical tensor where this rank's part is set and other ranks' are zero; their sum is the whole."""
        if self.sharded:
            whole = held.new_zeros(self.padded)
            part = self._slice(whole)
            part.copy_(held.view(part.shape))
        else:
            whole = held if self.tp.rank == 0 else torch.zeros_like(held)
        return whole[: self.shape[0]]

    def _slice(self, padded: torch.Tensor) -> torch.Tensor:
        """A view of this rank's part, the sharded dimension split into (parts, size of a part's slice)."""
        dim, parts = self.shard.dim, self.shard.parts
        size = self.padded[dim] // parts // self.tp.size
        return padded.unflatten(dim, (parts, self.tp.size, size)).select(dim + 1, self.tp.rank)


class Registry:
    """The entries of a model, or of a part of it, by canonical name, in the model's order."""

    def __init__(self, model: nn.Module, tp: Group = ALONE) -> None:
        self.tp = tp
        self._entries = {name: _entry(name, parameter, tp) for name, parameter in model.named_parameters()}
        for entry in self:
            # DeepSpeed's gradient norm counts a parameter without this mark on the first tensor-parallel rank alone
            entry.parameter.tensor_model_parallel = entry.sharded

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
                entry.parameter.copy_(entry.take(first))

    def optimizer_groups(self, weight_decay: float) -> list[dict]:
        """Parameter groups for a torch optimizer: matrices are decayed, vectors are not."""
        groups = []
        for decayed in (True, False):
            parameters = [entry.parameter for entry in self if entry.decayed is decayed]
            if parameters:
                groups.append({"params": parameters, "weight_decay": weight_decay if decayed else 0.0})
        return groups


def _entry(name: str, parameter: nn.Parameter, tp: Group) -> Entry:
    declaration = getattr(parameter, "declaration", None)
    if declaration is None:
        raise TypeError(f"parameter {name} was not declared: its module must call registry.declare on it")
    held, shard = tuple(parameter.shape), declaration.shard
    padded = list(held)
    if shard is not None:
        padded[shard.dim] *= tp.size
    shape = list(padded)
    if declaration.rows is not None:
        shape[0] = declaration.rows
    return Entry(
        name, parameter, declaration.init, shard, tp, held, tuple(padded), tuple(shape), decayed=len(shape) > 1
    )
