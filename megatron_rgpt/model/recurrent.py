"""The recurrent-depth transformer: prelude, looped core, coda (paper Listing A.1); without a core, dense GPT-2.

Shapes: S sequence, s = S/tp the part of it on this rank, B samples, D hidden size, V vocabulary. Activations are
[s, B, D]; tokens and labels are [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.model.block import Block
from megatron_rgpt.model.head import Head, mean_loss
from megatron_rgpt.model.recurrence import StepContext, build_rule
from megatron_rgpt.parallel.layers import VocabParallelEmbedding
from megatron_rgpt.parallel.mesh import ALONE, Group
from megatron_rgpt.parallel.registry import Registry
from megatron_rgpt.randomness import Noise


class RecurrentTransformer(nn.Module):
    """A model of any layout. `recompute` keeps only block inputs and h^(k) for the backward pass."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, recompute: bool = False, tp: Group = ALONE) -> None:
        super().__init__()
        layout = config.layout
        self.config, self.vocab_size, self.recompute, self.tp = config, vocab_size, recompute, tp
        self.embedding = VocabParallelEmbedding(
            vocab_size, config.seq_length, config.hidden_size, config.init_method_std, tp
        )
        self.prelude = nn.ModuleList(Block(config, tp) for _ in range(layout.prelude))
        self.core = nn.ModuleList(Block(config, tp) for _ in range(layout.core))
        self.rule = None if layout.is_dense else build_rule(config)
        self.coda = nn.ModuleList(Block(config, tp) for _ in range(layout.coda))
        self.head = Head(config, vocab_size, self.embedding, tp)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        *,
        depth: int | None = None,
        exits: Sequence[int] | None = None,
        noise: Noise | None = None,
        positions_BS: torch.Tensor | None = None,
        weights_BS: torch.Tensor | None = None,
        gate_override: float | None = None,
    ) -> torch.Tensor:
        """Logits [B, S, V], or with labels the mean loss in nats.

        `depth` r defaults to R and may be 0 or beyond R. `exits` asks for several depths of one loop, in rising
        order: the result then has a leading dimension of that length. Noise is off unless given; positions are 0..S-1
        unless given; `weights_BS` says what each token's loss counts, default 1.
        """
        depths = [self.default_depth if depth is None else depth] if exits is None else list(exits)
        if noise is not None:
            noise = replace(noise, part=self.tp.rank, parts=self.tp.size)
        results = []
        for state_sBD in self._states(tokens_BS, positions_BS, depths, noise, gate_override):
            for block in self.coda:
                state_sBD = self._run(block, state_sBD)
            if labels_BS is None:
                results.append(self.head(state_sBD))
            else:
                results.append(mean_loss(self.head(state_sBD, labels_BS), weights_BS) + self._extra_loss())
        return results[0] if exits is None else torch.stack(results)

    def _extra_loss(self) -> torch.Tensor | float:
        """The rule's own loss, in training."""
        extra = self.rule.extra_loss() if self.rule is not None and torch.is_grad_enabled() else None
        return 0.0 if extra is None else extra

    @property
    def default_depth(self) -> int:
        """R, or 0 for a dense model."""
        return self.config.layout.recurrences

    def _states(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        depths: Sequence[int],
        noise: Noise | None,
        gate_override: float | None,
    ) -> Iterator[torch.Tensor]:
        """h^(k) for each k of `depths`, in rising order."""
        h_sBD = self.embedding(tokens_BS, positions_BS)
        for block in self.prelude:
            h_sBD = self._run(block, h_sBD)
        assert list(depths) == sorted(depths) and (self.rule is not None or depths[-1] == 0), depths
        anchor = ()
        if depths[-1] > 0:
            h_sBD, anchor = self.rule.start(h_sBD)
        step = 0
        for depth in depths:
            while step < depth:
                step += 1
                h_sBD = self._run(self._recur, h_sBD, anchor, StepContext(step, noise, gate_override))
            if step == 0 and torch.is_grad_enabled() and self.rule is not None:
                h_sBD = self._untouched(h_sBD, noise, gate_override)
            yield h_sBD

    def _recur(self, state_sBD: torch.Tensor, anchor: tuple[torch.Tensor, ...], context: StepContext) -> torch.Tensor:
        """One recurrence: the unit of recomputation and of compilation."""
        o_sBD = self.rule.project(state_sBD, anchor, context)
        arguments = self.rule.core_arguments(context)
        for block in self.core:
            o_sBD = block(o_sBD, **arguments)
        return self.rule.update(state_sBD, o_sBD, anchor, context)

    def _untouched(self, h_sBD: torch.Tensor, noise: Noise | None, gate_override: float | None) -> torch.Tensor:
        """h itself, with zero gradients for the loop's parameters, by a step whose result is thrown away.

        Training at depth 0 alone would leave them without gradients, and ZeRO-3 would then use the last step's.
        """
        state_sBD, anchor = self.rule.start(h_sBD)
        unused_sBD = self._run(self._recur, state_sBD, anchor, StepContext(1, noise, gate_override))
        return torch.where(torch.zeros_like(h_sBD, dtype=torch.bool), unused_sBD, h_sBD)

    def _run(self, function, *arguments):
        if self.recompute and torch.is_grad_enabled():
            # not reentrant: a shared weight's gradient then reaches ZeRO's hooks once per micro-batch, not once per
            # step; no RNG state to keep, since noise has none
            return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return function(*arguments)


def build_model(
    config: ModelConfig, vocab_size: int, seed: int, *, recompute: bool = False, tp: Group = ALONE
) -> tuple[RecurrentTransformer, Registry]:
    """This rank's part of a model with its initial weights, fp32 on the CPU, and its registry."""
    model = RecurrentTransformer(config, vocab_size, recompute=recompute, tp=tp)
    registry = Registry(model, tp)
    registry.initialize(seed)
    return model, registry
