"""Parameters and FLOPs of a model, from its configuration alone.

One multiply-add is 2 FLOPs. Attention is counted over the full S x S square, as in the paper's Eq. 1, and the
vocabulary without its padding, so that no layout changes a count.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rgpt.config import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Stored parameters. `total` = embeddings + blocks + modulation + final norm; the head is tied."""

    embedding: int
    blocks: int
    modulation: int
    final_norm: int

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding

    @property
    def non_embedding(self) -> int:
        return self.blocks + self.modulation + self.final_norm


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCounts:
    """Logical parameters of the model."""
    D, layout = config.hidden_size, config.layout
    block = 12 * D * D + 13 * D
    projection = 2 * D * D if config.anchor else 0
    gate = 3 * D * D + 2 * D + 4 * D if config.gate else 0
    return ParameterCounts(
        embedding=(vocab_size + config.seq_length) * D,
        blocks=layout.unique_blocks * block,
        modulation=0 if layout.is_dense else projection + gate,
        final_norm=2 * D,
    )


def count_sharded(config: ModelConfig, vocab_size: int) -> int:
    """Parameters of `count_parameters` that tensor-parallel ranks share out; the others are on every one."""
    D = config.hidden_size
    return vocab_size * D + config.layout.unique_blocks * (12 * D * D + 7 * D)


def paper_flops_per_token(config: ModelConfig, depth: int | None = None) -> int:
    """Forward FLOPs per token by Eq. 1: (p + b r + c)(24 d² + 4 S d) + r 10 d², without the head."""
    depth = config.layout.recurrences if depth is None else depth
    D = config.hidden_size
    return config.layout.block_executions(depth) * _block_flops(config) + depth * 10 * D * D


def executed_flops_per_token(config: ModelConfig, vocab_size: int, depth: int | None = None) -> int:
    """Forward FLOPs per token that the code executes at this depth: anchor terms hoisted or not, head included."""
    layout, D = config.layout, config.hidden_size
    depth = layout.recurrences if depth is None else depth
    # (each step, once): the state's half and the gate's second layer, and the anchor's halves
    step = (2 * D * D if config.anchor else 0) + (4 * D * D if config.gate else 0)
    anchor = (2 * D * D if config.anchor else 0) + (2 * D * D if config.gate else 0)
    modulation = depth * step + anchor * ((depth > 0) if config.hoist_anchor else depth)
    return layout.block_executions(depth) * _block_flops(config) + modulation + 2 * D * vocab_size


def _block_flops(config: ModelConfig) -> int:
    D = config.hidden_size
    return 24 * D * D + 4 * config.seq_length * D
