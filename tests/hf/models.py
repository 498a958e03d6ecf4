"""Small exported models for tests, and what they must compute, written out a second time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_rgpt.hf.in_memory import transformers_model
from megatron_rgpt.hf.modeling_recurrent_gpt import RecurrentGPTForCausalLM
from tests.model.models import VOCABULARY, small_model

CONTEXT = 40
KEEP = {
    "last": lambda steps: steps[-1],
    "first": lambda steps: steps[0],
    "average": lambda steps: torch.stack(steps).mean(0),
}


def lively_model(layout: str = "1+2x3+1", *, seed: int = 1, **changes):
    """A model of ours in fp64 whose weights are large, so that attention and the loop matter."""
    values = {"seq_length": CONTEXT, "init_method_std": 0.15, **changes}
    return small_model(layout, seed=seed, double=True, **values)


def exported(layout: str = "1+2x3+1", **changes) -> RecurrentGPTForCausalLM:
    return transformers_model(lively_model(layout, **changes))


def some_tokens(samples: int = 3, length: int = 13, seed: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


class ByHand:
    """One sample, token by token, in plain products: what a KV strategy means (paper §6 row 12).

    A prompt sees itself step by step; a later token sees what the strategy kept of the tokens before it, and itself
    as the running step has it.
    """

    def __init__(self, model: RecurrentGPTForCausalLM, strategy: str) -> None:
        self.model, self.keep = model.model, KEEP[strategy]
        self.past: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.length = 0

    def run(self, tokens_N: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [N, V] of the next tokens of the sample."""
        model, rule = self.model, self.model.rule
        written: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

        def blocks(kind: str, h: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(getattr(model, kind)):
                h = self._block(block, h, (kind, number), written)
            return h

        positions = torch.arange(self.length, self.length + len(tokens_N))
        h = model.embedding.tokens.weight[tokens_N] + model.embedding.positions.weight[positions]
        h = h_pre = blocks("prelude", h)
        for _ in range(depth):
            w_proj = torch.cat([rule.projection.state.weight, rule.projection.anchor.weight], dim=1)
            o = blocks("core", torch.cat([h, h_pre], dim=-1) @ w_proj.t())
            gate = rule.gate
            first = torch.cat([gate.state.weight, gate.anchor.weight], dim=1)
            both = torch.cat([gate.state_norm(h), gate.anchor_norm(h_pre)], dim=-1)
            g = torch.sigmoid(gate.out(F.silu(both @ first.t() + gate.anchor.bias)))
            h = g * h + (1 - g) * o
        h = model.norm(blocks("coda", h))
        for place, steps in written.items():
            kept = tuple(self.keep([step[i] for step in steps]) for i in (0, 1))
            before = self.past.get(place)
            self.past[place] = kept if before is None else tuple(map(torch.cat, zip(before, kept, strict=True)))
        self.length += len(tokens_N)
        return h @ model.embedding.tokens.weight.t()

    def _block(self, block, x_ND: torch.Tensor, place: tuple[str, int], written: dict) -> torch.Tensor:
        (N, D), heads = x_ND.shape, block.attention.heads
        q, k, v = block.attention.qkv(block.attention_norm(x_ND)).split(D, dim=-1)
        written.setdefault(place, []).append((k, v))
        if place in self.past:
            k, v = (torch.cat([before, now]) for before, now in zip(self.past[place], (k, v), strict=True))
        q, k, v = (part.view(len(part), heads, D // heads).transpose(0, 1) for part in (q, k, v))
        scores = q @ k.transpose(1, 2) / (D // heads) ** 0.5
        hidden = torch.ones(N, k.shape[1], dtype=torch.bool).triu(k.shape[1] - N + 1)
        y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x_ND = x_ND + block.attention.out(y.transpose(0, 1).reshape(N, D))
        return x_ND + block.mlp.down(F.gelu(block.mlp.up(block.mlp_norm(x_ND))))
