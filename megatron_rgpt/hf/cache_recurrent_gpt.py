"""The KV cache of a looped core: one store per step, or one for all steps. Part of an exported model.

A forward of N tokens writes their keys and values step by step. Under `full` each recurrence has a store of its own.
Under `last`, `first` and `average` a core block has one store: while a token is in the loop, its slot holds what the
running step computed, so that it attends to itself as it is; once the loop is left, the slot keeps the strategy's one
set. Tokens of one forward see each other step by step (a prefill is exact), tokens of earlier forwards by what was
kept. Nothing is ever held R times.

Shapes: B batch, H heads, N tokens of this forward, T slots, E head size; of tokens still in an adaptive loop, R rows of
the batch and A tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_recurrent_gpt import KV_SHARING, RecurrentGPTConfig


class Filled:
    """How many slots hold tokens; one count for all layers of a cache.

    A static cache counts in a tensor: a number would make `torch.compile` trace every decoding step anew.
    """

    def __init__(self, static: bool) -> None:
        self.length: int | torch.Tensor = 0
        if static:
            self.length = _at_fixed_address(torch.zeros((), dtype=torch.long))
        self.empty = True

    def advance(self, tokens: int) -> None:
        # a tensor in place: a compiled step finds it at the same address
        self.length += tokens
        self.empty = False

    def set(self, length: int | torch.Tensor) -> None:
        if isinstance(self.length, torch.Tensor):
            self.length.fill_(length)
        else:
            self.length = int(length)
        self.empty = bool(length == 0)

    def move(self, device: torch.device) -> None:
        """Before the first forward: count where the cache will be."""
        if isinstance(self.length, torch.Tensor) and self.length.device != device:
            self.length = _at_fixed_address(self.length.to(device))


@dataclass(frozen=True)
class Place:
    """Which tokens a write is for, and at which recurrence (from 1; 1 outside the core)."""

    start: int | torch.Tensor
    """Slot of the first of the forward's tokens."""
    tokens: int
    """N, how many they are."""
    step: int = 1
    exact: bool = False
    """The forward fills an empty cache and no token leaves early: it attends to what it computes, not to the cache."""
    rows_R1: torch.Tensor | None = None
    columns_RA: torch.Tensor | None = None
    """The tokens still in the loop, by row of the batch and number among the N; None: all."""

    @property
    def packed(self) -> bool:
        return self.rows_R1 is not None

    def slots_N(self, device: torch.device) -> torch.Tensor:
        return torch.arange(self.tokens, device=device) + self.start


class RecurrentLayer(CacheLayerMixin):
    """Keys and values of one block, [B, H, slots, E], growing as needed.

    `keep` is what is left of several steps' writes to a token's slot: the `last`, the `first`, or their `average`.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, filled: Filled, keep: str = "last") -> None:
        super().__init__()
        self.filled, self.keep = filled, keep
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        B, H, N, E = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        # zeros, not garbage: a masked slot enters a product with weight 0, and 0 · NaN is NaN
        self.keys = torch.zeros(B, H, self.slots_for(N), E, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def slots_for(self, tokens: int) -> int:
        return -(-tokens // 64) * 64

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, place: Place | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens of `place`, [R, H, A, E], and return all that they may attend to.

        The cache's length does not move before `RecurrentCache.finish`.
        """
        if not isinstance(place, Place):
            place = Place(self.filled.length, key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if place.exact:
            for store, new in ((self.keys, key_states), (self.values, value_states)):
                _fold(store[:, :, : place.tokens], new.detach(), self.keep, place.step)
            return key_states, value_states
        new = (key_states.detach(), value_states.detach())
        if self.keep != "last":
            self._keep_apart(new, place)
        self._write(new, place)
        keys, values = self.visible(place)
        return (keys[place.rows_R1[:, 0]], values[place.rows_R1[:, 0]]) if place.packed else (keys, values)

    def visible(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values up to the forward's last token."""
        end = place.start + place.tokens
        return self.keys[:, :, :end], self.values[:, :, :end]

    def of(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the forward's own tokens."""
        end = place.start + place.tokens
        return self.keys[:, :, place.start : end], self.values[:, :, place.start : end]

    def settle(self, place: Place) -> None:
        """Leave the loop: put what the strategy keeps into the slots."""
        if self.kept is not None:
            self._write(self.kept, place)
            self.kept = None

    def continue_from(self, earlier: RecurrentLayer, place: Place) -> None:
        """Start this step's slots of the forward's tokens as the step before left them."""
        if not self.is_initialized:
            self.lazy_initialization(*earlier.visible(place))
        self._write(earlier.of(place), place)

    def _keep_apart(self, new: tuple[torch.Tensor, torch.Tensor], place: Place) -> None:
        if self.kept is None:
            self.kept = (new[0].clone(), new[1].clone())
            return
        for kept, values in zip(self.kept, new, strict=True):
            if not place.packed:
                _fold(kept, values, self.keep, place.step)
            elif self.keep == "average":
                at = (place.rows_R1, slice(None), place.columns_RA)
                kept[at] = torch.lerp(kept[at], values.transpose(1, 2), 1 / place.step)

    def _write(self, new: tuple[torch.Tensor, torch.Tensor], place: Place) -> None:
        if place.packed:
            for store, values in zip((self.keys, self.values), new, strict=True):
                # indices around a slice: the result has them in front, [R, A, H, E]
                store[place.rows_R1, :, place.columns_RA + place.start] = values.transpose(1, 2)
            return
        self._make_room(place.start + place.tokens)
        for store, values in zip(self.of(place), new, strict=True):
            store.copy_(values)

    def _make_room(self, slots: int) -> None:
        missing = slots - self.keys.shape[2]
        if missing > 0:
            B, H, T, E = self.keys.shape
            room = self.keys.new_zeros(B, H, self.slots_for(max(missing, T // 2)), E)
            self.keys = torch.cat([self.keys, room], dim=2)
            self.values = torch.cat([self.values, room], dim=2)

    def get_seq_length(self) -> int | torch.Tensor:
        return self.filled.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        # transformers 4 passes the positions of the queries, 5 their number
        tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + tokens, 0

    def get_max_length(self) -> int:
        """-1: no limit of its own (transformers 5's name)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same under transformers 4's name."""
        return self.get_max_length()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)


class StaticRecurrentLayer(RecurrentLayer):
    """A layer of `max_cache_len` slots whose shapes and addresses never change."""

    is_compileable = True

    def __init__(self, filled: Filled, keep: str, max_cache_len: int) -> None:
        super().__init__(filled, keep)
        self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = _at_fixed_address(self.keys), _at_fixed_address(self.values)

    def slots_for(self, tokens: int) -> int:
        return self.max_cache_len

    def visible(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """All slots: the mask hides those to come."""
        return self.keys, self.values

    def of(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        slots_N = place.slots_N(self.keys.device)
        return self.keys.index_select(2, slots_N), self.values.index_select(2, slots_N)

    def _write(self, new: tuple[torch.Tensor, torch.Tensor], place: Place) -> None:
        if place.packed:
            super()._write(new, place)
            return
        for store, values in zip((self.keys, self.values), new, strict=True):
            store.index_copy_(2, place.slots_N(store.device), values)

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class RecurrentCache(Cache):
    """The cache of one model at one depth. With `max_cache_len` its shapes are static."""

    def __init__(
        self,
        config: RecurrentGPTConfig,
        *,
        num_recurrences: int | None = None,
        kv_sharing: str | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        self.num_recurrences = config.num_recurrences if num_recurrences is None else num_recurrences
        self.kv_sharing = config.kv_sharing if kv_sharing is None else kv_sharing
        if self.kv_sharing not in KV_SHARING:
            raise ValueError(f"kv_sharing {self.kv_sharing!r}: one of {', '.join(KV_SHARING)}")
        self.max_slots = max_cache_len
        self.filled = Filled(static=max_cache_len is not None)
        self.per_step = self.kv_sharing == "full"

        def layers(number: int, keep: str = "last") -> list[RecurrentLayer]:
            if max_cache_len is None:
                return [RecurrentLayer(self.filled, keep) for _ in range(number)]
            return [StaticRecurrentLayer(self.filled, keep, max_cache_len) for _ in range(number)]

        self.prelude, self.coda = layers(config.n_prelude), layers(config.n_coda)
        if self.per_step:
            self.steps = [layers(config.n_core) for _ in range(self.num_recurrences)]
        else:
            self.steps = [layers(config.n_core, self.kv_sharing) if self.num_recurrences else []]
        super().__init__(layers=[*self.prelude, *(layer for step in self.steps for layer in step), *self.coda])

    def core(self, step: int) -> list[RecurrentLayer]:
        """The stores of the core's blocks at recurrence `step`, from 1."""
        return self.steps[step - 1 if self.per_step else 0]

    def place(self, tokens: int, device: torch.device, *, exact: bool) -> Place:
        """Where the next forward's tokens go."""
        self.filled.move(device)
        return Place(self.filled.length, tokens, exact=exact and self.filled.empty)

    def carry(self, step: int, place: Place) -> None:
        """Show `step` of an adaptive loop the tokens that have left, as their last step left them."""
        if self.per_step:
            for earlier, layer in zip(self.core(step - 1), self.core(step), strict=True):
                layer.continue_from(earlier, place)

    def finish(self, place: Place) -> None:
        """The forward is over: keep what the strategy keeps, and count its tokens."""
        for step in self.steps:
            for layer in step:
                layer.settle(place)
        self.filled.advance(place.tokens)

    def crop(self, tokens: int) -> None:
        """Forget the last -`tokens` tokens; a positive number is the length to keep (transformers 4)."""
        left = tokens if tokens > 0 else self.filled.length + tokens
        self.filled.set(min(left, self.filled.length))

    def reset(self) -> None:
        super().reset()
        self.filled.set(0)


def _at_fixed_address(tensor: torch.Tensor) -> torch.Tensor:
    """Tell `torch.compile` that this tensor stays where it is, so that CUDA graphs may write to it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def _fold(kept: torch.Tensor, new: torch.Tensor, keep: str, step: int) -> None:
    """Take a step's write into what is kept of the steps up to it."""
    if step == 1 or keep == "last":
        kept.copy_(new)
    elif keep == "average":
        kept.lerp_(new, 1 / step)
