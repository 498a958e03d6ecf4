"""A looped model for lm-eval-harness: chosen depth, KV strategy and adaptive exit.

Log-likelihood tasks never decode, so a KV strategy would not act on them. Here a context is prefilled with every
step's keys and values, the cache is collapsed as the strategy says, and the continuation is scored on what is left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.models.huggingface import HFLM

Request = tuple[tuple[str, str], list[int], list[int]]


class RecurrentLM(HFLM):
    """`loop` are arguments of the model's `forward`: `num_recurrences`, `kv_sharing`, `exit_threshold`, ..."""

    def __init__(self, pretrained: str, loop: dict[str, Any], **options: Any) -> None:
        super().__init__(pretrained, trust_remote_code=True, backend="causal", **options)
        self.loop = loop

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        with torch.no_grad():
            return self.model(inps, **self.loop).logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        return super()._model_generate(context, max_length, stop, **options, **self.loop)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each request's continuation, and whether it is what the model would say."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]))
        size = override_bs or int(self.batch_size)
        results: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            scores = self._score([requests[i][1:] for i in chosen])
            results |= dict(zip(chosen, scores, strict=True))
        return [results[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        pairs = [self._cut(*pair) for pair in pairs]
        contexts_BN, seen_BN = self._padded([context for context, _ in pairs], left=True)
        prefill = self._run(contexts_BN, seen_BN, logits_to_keep=1)
        logits = [prefill.logits]
        # the last token of a continuation predicts nothing that is scored
        inputs_BN, real_BN = self._padded([continuation[:-1] for _, continuation in pairs], left=False)
        if inputs_BN.shape[1]:
            # transformers 5 renamed the cache
            field = "cache" if "cache" in prefill else "past_key_values"
            mask_BT = torch.cat([seen_BN, real_BN], dim=1)
            logits.append(self._run(inputs_BN, mask_BT, **{field: prefill[field]}).logits)
        logits_BNV = torch.cat(logits, dim=1).float()
        scores = []
        for (_, continuation), logits_NV in zip(pairs, logits_BNV, strict=True):
            targets_N = torch.tensor(continuation, device=logits_NV.device)
            logits_NV = logits_NV[: len(continuation)]
            loss = F.cross_entropy(logits_NV, targets_N, reduction="sum")
            scores.append((-loss.item(), bool((logits_NV.argmax(-1) == targets_N).all())))
        return scores

    def _run(self, tokens_BN: torch.Tensor, mask_BT: torch.Tensor, **options: Any) -> Any:
        # positions are given, since GPT-2, a dense model's export, does not count from the first real token
        positions_BN = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -tokens_BN.shape[1] :]
        return self.model(
            tokens_BN, attention_mask=mask_BT, position_ids=positions_BN, use_cache=True, **options, **self.loop
        )

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """What fits: the continuation's last tokens, and as much of the context before them; at least one of it."""
        continuation = continuation[-self.max_length :]
        room = max(1, self.max_length + 1 - len(continuation))
        return context[-room:], continuation

    def _padded(self, rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, N] and which of them are no padding."""
        width = max(map(len, rows))
        tokens, real = [], []
        for row in rows:
            padding, ones = [0] * (width - len(row)), [1] * len(row)
            tokens.append(padding + row if left else row + padding)
            real.append(padding + ones if left else ones + padding)
        return torch.tensor(tokens, device=self.device), torch.tensor(real, device=self.device)
