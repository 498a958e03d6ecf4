"""Sample a continuation from a model, without caches: each new token runs the model over the last S tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rgpt.model.recurrent import RecurrentTransformer
from megatron_rgpt.randomness import key


@torch.no_grad()
def generate(
    model: RecurrentTransformer,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    depth: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """Up to `new_tokens` ids after the prompt (at least one id), ending early at `stop`.

    Temperature 0 takes the likeliest token; `top_k` samples among the k likeliest; `depth` is r, default R.
    """
    generator = torch.Generator().manual_seed(key(seed, "generate") & (2**63 - 1))
    tokens = list(prompt)
    for _ in range(new_tokens):
        window_1S = torch.tensor([tokens[-model.config.seq_length :]])
        logits_V = model(window_1S, depth=depth)[0, -1].float()
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
