#!/usr/bin/env python
"""Figures of the exported model against its dense twin of equal block executions, as ratios of one run.

memory      bytes of weights and static KV caches, bf16, T 1,024: 2+5x4+2 over GPT-2 medium (paper Table 4)
generation  time of prefill and new tokens, eager: 2+5x4+2 over 24 blocks, at a small width (paper Table 3: 1.23).
            Twice: over the same code without a loop, which costs 1.06 in FLOPs, and over transformers' GPT-2
cache       decoding without a cache over decoding with one, at 512 tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

from megatron_rgpt.data.command_line import OneLineParser, at_least_one
from megatron_rgpt.errors import UserError, exit_on_user_error
from megatron_rgpt.hf.cache_recurrent_gpt import RecurrentCache
from megatron_rgpt.hf.configuration_recurrent_gpt import RecurrentGPTConfig
from megatron_rgpt.hf.modeling_recurrent_gpt import CACHE_FIELD, RecurrentGPTForCausalLM

LAYOUT = {"n_prelude": 2, "n_core": 5, "num_recurrences": 4, "n_coda": 2}
EXECUTIONS = 24
PAPER = [(1, "full", 0.547), (32, "full", 0.907), (32, "average", 0.394)]


def looped_model(width: int, positions: int, vocabulary: int) -> RecurrentGPTForCausalLM:
    """2+5x4+2 with random weights, on torch's default device."""
    return _recurrent(width, positions, vocabulary, **LAYOUT)


def same_code_without_loop(width: int, positions: int, vocabulary: int) -> RecurrentGPTForCausalLM:
    """24 blocks in the prelude: the dense twin as our code computes it."""
    return _recurrent(
        width,
        positions,
        vocabulary,
        n_prelude=EXECUTIONS,
        n_core=0,
        num_recurrences=0,
        n_coda=0,
        anchor=False,
        gate=False,
    )


def gpt2(width: int, positions: int, vocabulary: int) -> GPT2LMHeadModel:
    """The dense twin as transformers computes it, and as a dense model is exported."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_head=width // 64,
        n_layer=EXECUTIONS,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def _recurrent(width: int, positions: int, vocabulary: int, **layout) -> RecurrentGPTForCausalLM:
    config = RecurrentGPTConfig(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=width,
        num_attention_heads=width // 64,
        **layout,
    )
    return RecurrentGPTForCausalLM(config).eval()


def held_bytes(model: PreTrainedModel, cache: RecurrentCache | StaticCache) -> int:
    """Bytes of the storages of a model's distinct weights and of a cache."""
    tensors = [*model.parameters(), *(part for layer in cache.layers for part in (layer.keys, layer.values))]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def memory() -> list[dict]:
    """Table 4 of the paper. On the meta device, whose storages are as large as real ones and take no memory."""
    with torch.device("meta"):
        looped, dense = (make(1024, 1024, 50257).to(torch.bfloat16) for make in (looped_model, gpt2))
    rows = []
    for batch, strategy, paper in PAPER:
        shape = {"batch_size": batch, "num_heads": 16, "head_dim": 64, "dtype": torch.bfloat16, "device": "meta"}
        ours = RecurrentCache(looped.config, kv_sharing=strategy, max_cache_len=1024)
        theirs = StaticCache(config=dense.config, max_cache_len=1024)
        for cache in (ours, theirs):
            cache.early_initialization(**shape)
        ratio = held_bytes(looped, ours) / held_bytes(dense, theirs)
        print(f"memory, batch {batch}, {strategy}: {ratio:.3f} of GPT-2 medium (paper {paper})", flush=True)
        rows.append({"figure": "memory", "batch": batch, "kv_sharing": strategy, "ratio": ratio, "expected": paper})
    return rows


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, taken in turns after a warm-up, and the median ratio of the pairs."""
    first(), second()
    pairs = [(timed(first), timed(second)) for _ in range(repeats)]
    ratio = statistics.median(a / b for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def generation(arguments: argparse.Namespace, device: str) -> list[dict]:
    """Table 3 of the paper, eager, against each twin and with each strategy."""
    size = (arguments.width, arguments.prompt + arguments.new_tokens, arguments.vocabulary)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        prompt = torch.randint(arguments.vocabulary, (arguments.batch, arguments.prompt))
        looped = looped_model(*size).to(dtype)
        dense = {"same code": same_code_without_loop(*size).to(dtype), "GPT-2": gpt2(*size).to(dtype)}

    def generate(model: PreTrainedModel, **options) -> Callable[[], object]:
        length = {"max_new_tokens": arguments.new_tokens, "min_new_tokens": arguments.new_tokens}
        common = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(prompt, **common, **length, **options)

    rows = []
    for strategy in arguments.kv_sharing:
        for name, twin in dense.items():
            ours, theirs, ratio = paired(generate(looped, kv_sharing=strategy), generate(twin), arguments.repeats)
            print(
                f"generation, batch {arguments.batch}, prompt {arguments.prompt}, {arguments.new_tokens} new, width "
                f"{arguments.width}, {strategy}: {ours:.2f} s over {theirs:.2f} s ({name}) = {ratio:.3f}",
                flush=True,
            )
            rows.append({"figure": "generation", "kv_sharing": strategy, "twin": name, "ratio": ratio})
    return rows


@torch.no_grad()
def cache(arguments: argparse.Namespace, device: str) -> list[dict]:
    """Time of the token after 512 others, by the whole text and by the cache."""
    length = arguments.cached_tokens
    with torch.device(device):
        looped = looped_model(arguments.width, length + 1, arguments.vocabulary)
        tokens = torch.randint(arguments.vocabulary, (1, length + 1))
    filled = looped(tokens[:, :-1], use_cache=True)[CACHE_FIELD]

    def with_cache() -> None:
        for _ in range(10):
            looped(tokens[:, -1:], use_cache=True, **{CACHE_FIELD: filled})
            filled.crop(-1)

    def without() -> None:
        looped(tokens, use_cache=False, logits_to_keep=1)

    slow, fast, ratio = paired(without, with_cache, arguments.repeats)
    ratio *= 10
    print(
        f"cache, {length} tokens: {1e3 * slow:.1f} ms without over {100 * fast:.2f} ms with = {ratio:.1f}", flush=True
    )
    return [{"figure": "cache", "tokens": length, "ratio": ratio}]


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--figures", nargs="+", choices=("memory", "generation", "cache"), default=("memory", "generation", "cache"))
    add("--width", type=at_least_one, default=256, help="hidden size of the timed models, a multiple of 64 [256]")
    add("--vocabulary", type=at_least_one, default=2048, help="of the timed models [2048]")
    add("--batch", type=at_least_one, default=4, help="[4]")
    add("--prompt", type=at_least_one, default=1024, help="tokens [1024]")
    add("--new-tokens", type=at_least_one, default=128, help="[128]")
    add("--cached-tokens", type=at_least_one, default=512, help="[512]")
    add("--kv-sharing", nargs="+", choices=("full", "last", "first", "average"), default=["full", "average"])
    add("--repeats", type=at_least_one, default=5, help="timed pairs; the median counts [5]")
    add("--json", metavar="FILE", help="write the figures there")
    with exit_on_user_error():
        arguments = parser.parse_args()
        if arguments.width % 64:
            raise UserError(f"--width {arguments.width}: must be a multiple of 64, the heads' size")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = memory() if "memory" in arguments.figures else []
    rows += generation(arguments, device) if "generation" in arguments.figures else []
    rows += cache(arguments, device) if "cache" in arguments.figures else []
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
