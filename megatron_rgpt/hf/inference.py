"""A model to talk to, from a run of ours or from a Hugging Face folder: tokenizer, cached next-token logits, exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rgpt.checkpoint.layout import find_checkpoint
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.errors import UserError
from megatron_rgpt.hf.hf_config import CONFIG, from_hf, read_hf_config
from megatron_rgpt.hf.shards import FolderTensors
from megatron_rgpt.hf.tokenizer_files import run_tokenizer
from megatron_rgpt.model.generate import NextLogits, next_logits
from megatron_rgpt.model.recurrent import RecurrentTransformer


@dataclass(frozen=True)
class Speaker:
    """A loaded model: `model` is ours where transformers is not installed, else transformers'."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end: int | None
    """The id that ends a text."""
    recurrences: int
    """R; 0 for a dense model."""
    context: int

    @property
    def cached(self) -> bool:
        return not isinstance(self.model, RecurrentTransformer)

    def next_logits(self, options: dict[str, Any]) -> NextLogits:
        """`options` are arguments of the model's `forward` at every token, such as `num_recurrences`."""
        if self.cached:
            return CachedLogits(self.model, self.context, options)
        unknown = sorted(set(options) - {"num_recurrences"})
        if unknown:
            raise UserError(f"--{unknown[0].replace('_', '-')} needs the package: pip install transformers")
        return next_logits(self.model, options.get("num_recurrences"))

    def exit_probabilities(self, prompt: Sequence[int], exits: Sequence[int]) -> torch.Tensor:
        """The next token's probabilities [K, V] when the loop is left after each of `exits` (paper Figure 4)."""
        tokens_1S = torch.tensor([prompt[-self.context :]])
        if self.cached:
            from megatron_rgpt.hf.in_memory import exit_logits

            logits_KV = exit_logits(self.model, tokens_1S, list(exits))[:, 0]
        else:
            with torch.no_grad():
                logits_KV = self.model(tokens_1S, exits=exits)[:, 0, -1].float()
        return logits_KV.softmax(-1)


class CachedLogits:
    """Next-token logits of a growing text: each call runs its new tokens alone.

    A text longer than the context has no room left in a cache of learned positions: its last tokens are run anew.
    """

    def __init__(self, model: Any, context: int, options: dict[str, Any]) -> None:
        from megatron_rgpt.hf.modeling_recurrent_gpt import CACHE_FIELD

        self._model, self._context, self._options, self._field = model, context, options, CACHE_FIELD
        self._cache: Any = None
        self._seen = 0

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        if len(tokens) > self._context:
            window_1S = torch.tensor([tokens[-self._context :]])
            return self._model(window_1S, use_cache=False, **self._options).logits[0, -1].float()
        new_1N = torch.tensor([tokens[self._seen :]])
        given = {self._field: self._cache, "use_cache": True, **self._options}
        output = self._model(new_1N, **given)
        self._cache, self._seen = output[self._field], len(tokens)
        return output.logits[0, -1].float()


def open_model(path: str) -> Speaker:
    """The model of a run, of one checkpoint, or of a Hugging Face folder (ours or GPT-2; its own code is not run).

    Raises `UserError` if it is none of these.
    """
    if (Path(path) / CONFIG).is_file():
        return _open_folder(Path(path))
    if find_checkpoint(path) is None:
        raise UserError(f"--load {path}: neither a run or checkpoint of ours nor a Hugging Face folder: check it")
    model, config, _ = load_model(path)
    tokenizer = run_tokenizer(config.data)
    talker: Any = model
    try:
        from megatron_rgpt.hf.in_memory import transformers_model
    except ModuleNotFoundError:
        pass
    else:
        talker = transformers_model(model)
    facts = (model.default_depth, config.model.seq_length)
    return Speaker(talker, tokenizer.encode, tokenizer.decode, tokenizer.eod, *facts)


def _open_folder(folder: Path) -> Speaker:
    config, _ = from_hf(folder, read_hf_config(folder))
    try:
        from transformers import AutoTokenizer, GPT2LMHeadModel
        from transformers.utils import logging

        from megatron_rgpt.hf.modeling_recurrent_gpt import RecurrentGPTForCausalLM
    except ModuleNotFoundError:
        raise UserError(f"--load {folder}: a Hugging Face folder needs the package: pip install transformers") from None
    with FolderTensors(folder):
        pass  # the shards are there and whole
    logging.disable_progress_bar()
    try:
        kind = GPT2LMHeadModel if config.layout.is_dense else RecurrentGPTForCausalLM
        model = kind.from_pretrained(folder).float().eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"--load {folder}: transformers cannot load it: {str(error).splitlines()[0]}") from None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    facts = (config.layout.recurrences, config.seq_length)
    return Speaker(model, encode, tokenizer.decode, tokenizer.eos_token_id, *facts)
