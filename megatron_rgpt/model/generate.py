"""Sample a continuation, token by token, from whatever says how likely each next token is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_rgpt.model.recurrent import RecurrentTransformer
from megatron_rgpt.randomness import key

NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""From all tokens so far to the logits [V] of the next one."""


def next_logits(model: RecurrentTransformer, depth: int | None = None) -> NextLogits:
    """A model's own, without caches: each call runs it over the last S tokens. `depth` is r, default R."""

    @torch.no_grad()
    def logits_V(tokens: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([tokens[-model.config.seq_length :]]), depth=depth)[0, -1].float()

    return logits_V


def generate(
    logits_of: NextLogits,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """Up to `new_tokens` ids after the prompt (at least one id), ending early at `stop`.

    Temperature 0 takes the likeliest token; `top_k` samples among the k likeliest.
    """
    generator = torch.Generator().manual_seed(key(seed, "generate") & (2**63 - 1))
    tokens = list(prompt)
    for _ in range(new_tokens):
        logits_V = logits_of(tokens)
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if top_k is not None:
                kept, ids = logits_V.topk(min(top_k, len(logits_V)))
                logits_V = torch.full_like(logits_V, -torch.inf).scatter(0, ids, kept)
            probabilities_V = torch.softmax(logits_V / temperature, dim=0)
            token = int(torch.multinomial(probabilities_V, 1, generator=generator))
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
