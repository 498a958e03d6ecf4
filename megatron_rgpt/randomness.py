"""Every random number of a run: a pure function of the seed and of what it is for.

Nothing here has a state that must be saved, and nothing knows ranks: an initial weight is keyed by the parameter's
canonical name, a depth and a noise tensor by the ordinal of the sample in the run (its number since the first
iteration, which no layout, batch size or restart changes). So recomputation replays its noise, a resume is exact,
and every layout draws the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


def key(seed: int, purpose: str, *names: str | int) -> int:
    """A 64-bit key for one draw: a hash of the seed, the purpose and what tells the draw from others."""
    text = "/".join(str(part) for part in (seed, purpose, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def fill_normal_(out: torch.Tensor, draw_key: int) -> torch.Tensor:
    """Fill `out` with standard normal numbers: a function of the key, and of `out`'s shape, dtype and kind of device.

    Always draw the logical shape and slice afterwards: torch's last values change with the length of the draw.
    A CPU generator keeps the low 32 bits of its seed, so two draws in a long run may coincide; none is correlated
    with its neighbours.
    """
    generator = torch.Generator(device=out.device).manual_seed(draw_key & (2**63 - 1))
    return out.normal_(generator=generator)


@dataclass(frozen=True)
class Noise:
    """The noise of one micro-batch: for each recurrence and purpose, standard normal numbers per sample.

    `ordinals` are the samples' numbers in the run. Draws are fp32, so that runs in other precisions see the same. Where
    the sequence is cut into `parts`, each rank draws all of it and keeps its `part`.
    """

    seed: int
    ordinals: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def draw_sBD(self, purpose: str, step: int, like_sBD: torch.Tensor) -> torch.Tensor:
        """Noise in the shape, dtype and device of `like_sBD`, whose B samples are those of `ordinals`."""
        s, B, D = like_sBD.shape
        assert len(self.ordinals) == B, f"{B} samples, {len(self.ordinals)} ordinals"
        noise_BSD = torch.empty(B, s * self.parts, D, device=like_sBD.device)
        for row_SD, ordinal in zip(noise_BSD, self.ordinals, strict=True):
            fill_normal_(row_SD, key(self.seed, purpose, ordinal, step))
        return noise_BSD[:, self.part * s : (self.part + 1) * s].transpose(0, 1).to(like_sBD.dtype)


def step_depths(seed: int, first_ordinal: int, *, sampling: str, groups: int, smallest: int, largest: int) -> list[int]:
    """Depth r of each of the D = `groups` depth groups of the iteration whose first sample is `first_ordinal`.

    `uniform` draws each from U{smallest..largest} (paper §3.4); `stratified` deals the values as equally as D
    allows, the remainder a freshly drawn subset, in random order, so that each group's marginal stays uniform;
    `fixed` is always `largest`.
    """
    if sampling == "fixed":
        return [largest] * groups
    generator = np.random.Generator(np.random.Philox(key=key(seed, "depth", first_ordinal)))
    values = np.arange(smallest, largest + 1)
    if sampling == "uniform":
        return generator.choice(values, size=groups).tolist()
    assert sampling == "stratified", sampling
    rounds, rest = divmod(groups, len(values))
    dealt = np.concatenate([np.tile(values, rounds), generator.choice(values, size=rest, replace=False)])
    return generator.permutation(dealt).tolist()
