"""The part of the model that one pipeline stage holds, under the names of the whole model."""

from __future__ import annotations

from torch import nn

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.model.block import Block
from megatron_rgpt.model.head import Head
from megatron_rgpt.model.recurrence import build_rule
from megatron_rgpt.parallel.layers import VocabParallelEmbedding
from megatron_rgpt.parallel.mesh import Group
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.pipeline.placement import HUB, Placement


class StageModel(nn.Module):
    """Shares of core and coda, and on the hub everything else. Blocks go by their index in the whole model."""

    def __init__(self, config: ModelConfig, vocab_size: int, placement: Placement, stage: int, tp: Group) -> None:
        super().__init__()
        self.config, self.stage, self.tp = config, stage, tp

        def blocks(indices: range) -> nn.ModuleDict:
            return nn.ModuleDict({str(index): Block(config, tp) for index in indices})

        # in the order of the whole model, so that a parameter shared by two modules has the name it has there
        if stage == HUB:
            self.embedding = VocabParallelEmbedding(
                vocab_size, config.seq_length, config.hidden_size, config.init_method_std, tp
            )
            self.prelude = blocks(range(placement.prelude))
        self.core = blocks(placement.core_blocks(stage))
        if stage == HUB:
            self.rule = build_rule(config)
        self.coda = blocks(placement.coda_blocks(stage))
        if stage == HUB:
            self.head = Head(config, vocab_size, self.embedding, tp)


def build_stage(
    config: ModelConfig, vocab_size: int, seed: int, placement: Placement, stage: int, tp: Group
) -> tuple[StageModel, Registry]:
    """This rank's part of a stage with its initial weights, fp32 on the CPU, and its registry."""
    model = StageModel(config, vocab_size, placement, stage, tp)
    registry = Registry(model, tp)
    registry.initialize(seed)
    return model, registry
