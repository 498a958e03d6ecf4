#!/usr/bin/env python
"""Continue prompts with the model of a run, of one checkpoint, or of a Hugging Face folder; or show its exits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_rgpt.data.command_line import OneLineParser, at_least_one
from megatron_rgpt.errors import UserError, exit_on_user_error
from megatron_rgpt.hf.exit_view import exit_row, exit_text, plot_exits
from megatron_rgpt.hf.inference import Speaker, open_model
from megatron_rgpt.model.generate import generate


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--load", required=True, metavar="FOLDER", help="a run's folder, one checkpoint's, or a Hugging Face folder")
    add("--prompt", required=True, nargs="+", metavar="TEXT", help="texts to continue")
    add("--new-tokens", type=at_least_one, default=200, metavar="N", help="how many tokens to sample [200]")
    add("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token [0.8]")
    add("--top-k", type=at_least_one, metavar="K", help="sample among the k likeliest tokens")
    add("--seed", type=int, default=0, help="of the sampling [0]")
    add("--num-recurrences", type=int, metavar="R", help="depth r, 0 or more (default: the model's R)")
    # transformers may be missing, and these lists are short
    add("--kv-sharing", choices=("full", "last", "first", "average"), help="what the KV cache keeps of the steps")
    add("--exit-threshold", type=float, metavar="X", help="each token leaves the loop when it changes by less")
    add("--exit-criterion", choices=("state", "kl"), help="of what: the state, or the next-token distribution")
    add(
        "--show-exits",
        nargs="?",
        const="exits.png",
        metavar="PNG",
        help="instead: the next token's probabilities after every step, as text and as a picture [exits.png]",
    )
    add("--answer", nargs="+", metavar="TEXT", help="with --show-exits: the answer to each prompt, its first token")
    return parser.parse_args()


def loop_options(arguments: argparse.Namespace, speaker: Speaker) -> dict[str, Any]:
    """The flags about the loop that were given, as arguments of the model."""
    names = ("num_recurrences", "kv_sharing", "exit_threshold", "exit_criterion")
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if options and speaker.recurrences == 0:
        name, value = next(iter(options.items()))
        raise UserError(f"--{name.replace('_', '-')} {value}: the model in {arguments.load} is dense and has no loop")
    if options.get("num_recurrences", 0) < 0:
        raise UserError(f"--num-recurrences {options['num_recurrences']}: must be 0 or more")
    return options


def encoded(speaker: Speaker, flag: str, text: str) -> list[int]:
    tokens = speaker.encode(text)
    if not tokens:
        raise UserError(f"{flag} is empty: give some text")
    return tokens


def show_exits(arguments: argparse.Namespace, speaker: Speaker) -> None:
    answers = arguments.answer or [None] * len(arguments.prompt)
    if len(answers) != len(arguments.prompt):
        raise UserError(f"--answer has {len(answers)} texts and --prompt {len(arguments.prompt)}: one for each")
    last = speaker.recurrences if arguments.num_recurrences is None else arguments.num_recurrences
    rows = []
    for prompt, answer in zip(arguments.prompt, answers, strict=True):
        probabilities_KV = speaker.exit_probabilities(encoded(speaker, "--prompt", prompt), range(last + 1))
        token = None if answer is None else encoded(speaker, "--answer", answer)[0]
        rows.append(exit_row(prompt, probabilities_KV, speaker.decode, token))
        print(exit_text(rows[-1]))
    plot_exits(rows, Path(arguments.show_exits))
    print(f"drawn to {arguments.show_exits}")


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        if arguments.temperature < 0:
            raise UserError(f"--temperature {arguments.temperature}: must not be negative")
        speaker = open_model(arguments.load)
        options = loop_options(arguments, speaker)
        if arguments.show_exits is not None:
            show_exits(arguments, speaker)
            return
        if not speaker.cached:
            print("transformers is not installed: generating without a KV cache", file=sys.stderr)
        for prompt in arguments.prompt:
            tokens = encoded(speaker, "--prompt", prompt)
            continuation = generate(
                speaker.next_logits(options),
                tokens,
                arguments.new_tokens,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                seed=arguments.seed,
                stop=speaker.end,
            )
            print(speaker.decode([*tokens, *continuation]))


if __name__ == "__main__":
    main()
