"""The layout string of a recurrent-depth transformer: `p+bxR+c`, or `L` for a dense model (paper §3.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rgpt.errors import UserError

_RECURRENT = re.compile(r"(\d+)\+(\d+)[x×*](\d+)\+(\d+)")
_DENSE = re.compile(r"\d+")


@dataclass(frozen=True)
class Layout:
    """`prelude` blocks once, `core` shared blocks looped `recurrences` times, `coda` blocks once.

    A dense model has its blocks in the prelude and neither a core nor a coda.
    """

    prelude: int
    core: int = 0
    recurrences: int = 0
    coda: int = 0

    @classmethod
    def parse(cls, text: str | int) -> Layout:
        """Read `2+5x4+2` (also with `×`) or `12`. Raises `UserError` for anything else."""
        text = str(text).replace(" ", "")
        if match := _RECURRENT.fullmatch(text):
            layout = cls(*(int(group) for group in match.groups()))
            if layout.core == 0 or layout.recurrences == 0:
                raise UserError(f"{text}: the core and R must be at least 1; for a dense model give its depth")
            return layout
        if _DENSE.fullmatch(text) and int(text) > 0:
            return cls(prelude=int(text))
        raise UserError(
            f"{text!r} does not parse: expected prelude+core x recurrences+coda such as 2+5x4+2, "
            "or the number of blocks of a dense model such as 12"
        )

    @property
    def is_dense(self) -> bool:
        return self.core == 0

    @property
    def unique_blocks(self) -> int:
        """Blocks whose weights are stored."""
        return self.prelude + self.core + self.coda

    def block_executions(self, depth: int) -> int:
        """Blocks a token passes through when the core is looped `depth` times."""
        return self.prelude + self.core * depth + self.coda

    def __str__(self) -> str:
        if self.is_dense:
            return str(self.prelude)
        return f"{self.prelude}+{self.core}x{self.recurrences}+{self.coda}"
