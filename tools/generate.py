#!/usr/bin/env python
"""Continue a prompt with the model of a run or of one checkpoint."""

from __future__ import annotations

import argparse

from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import UserError, exit_on_user_error
from megatron_rgpt.model.generate import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, metavar="FOLDER", help="a run's folder or one checkpoint's")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--new-tokens", type=int, default=200, help="how many tokens to sample [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token [0.8]")
    parser.add_argument("--top-k", type=int, help="sample among the k likeliest tokens")
    parser.add_argument("--num-recurrences", type=int, metavar="R", help="depth r, 0 or more (default: the model's R)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling [0]")
    args = parser.parse_args()
    with exit_on_user_error():
        model, config, _ = load_model(args.load)
        if args.num_recurrences is not None and (args.num_recurrences < 0 or config.model.layout.is_dense):
            raise UserError(f"--num-recurrences {args.num_recurrences}: 0 or more, and a looped model")
        data = config.data
        tokenizer = build_tokenizer(
            data.tokenizer_type,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            tokenizer_model=data.tokenizer_model,
            vocab_size=data.vocab_size,
        )
        prompt = tokenizer.encode(args.prompt)
        if not prompt:
            raise UserError("--prompt is empty: give some text")
        continuation = generate(
            model,
            prompt,
            args.new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            depth=args.num_recurrences,
            seed=args.seed,
            stop=tokenizer.eod,
        )
    print(args.prompt + tokenizer.decode(continuation))


if __name__ == "__main__":
    main()
