#!/usr/bin/env python
"""Loss against the average number of recurrences: at fixed depths, and with adaptive exit at several thresholds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from megatron_rgpt.data.command_line import OneLineParser, at_least_one
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.errors import UserError, exit_on_user_error
from megatron_rgpt.hf.inference import Speaker, open_model


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--load", required=True, metavar="FOLDER", help="a run's folder, one checkpoint's, or a Hugging Face folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", metavar="FILE", help="texts to read")
    source.add_argument("--data-path", metavar="PREFIX", help="an indexed pair; its last samples are read")
    add("--samples", type=at_least_one, default=16, metavar="N", help="sequences of the model's context [16]")
    add("--batch-size", type=at_least_one, default=4, metavar="N", help="sequences at a time [4]")
    add("--num-recurrences", type=at_least_one, metavar="R", help="the most steps (default: the model's R)")
    add("--exit-criterion", choices=("state", "kl"), default="state", help="what must stand still [state]")
    add(
        "--thresholds",
        type=float,
        nargs="+",
        metavar="X",
        help="of adaptive exit [.3 .2 .1 .05 .02; with kl: .1 .03 .01 .003 .001]",
    )
    return parser.parse_args()


def read_samples(arguments: argparse.Namespace, speaker: Speaker) -> torch.Tensor:
    """Tokens [samples, context + 1 at most], as many samples as there is text for."""
    if arguments.text:
        try:
            tokens = [token for path in arguments.text for token in speaker.encode(Path(path).read_text("utf-8"))]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {' '.join(arguments.text)}: cannot be read ({error})") from None
        stream = torch.tensor(tokens)
    else:
        dataset = IndexedDataset(arguments.data_path)
        wanted, parts = arguments.samples * (speaker.context + 1), []
        for number in range(len(dataset) - 1, -1, -1):
            parts.insert(0, torch.tensor(dataset[number].astype("int64")))
            if sum(map(len, parts)) >= wanted:
                break
        stream = torch.cat(parts)[-wanted:]
    length = min(speaker.context + 1, len(stream))
    if length < 2:
        raise UserError("the text has fewer than two tokens: give more")
    whole = stream[: len(stream) // length * length].view(-1, length)
    if int(whole.max()) >= speaker.model.config.vocab_size:
        raise UserError(f"--data-path {arguments.data_path}: token {int(whole.max())} is beyond the model's vocabulary")
    return whole[: arguments.samples]


@torch.no_grad()
def measure(speaker: Speaker, samples: torch.Tensor, batch: int, options: dict[str, Any]) -> tuple[float, float]:
    """(mean loss in nats, mean recurrences) over all tokens."""
    loss, steps, tokens = 0.0, 0, 0
    for rows_BS in samples.split(batch):
        output = speaker.model(rows_BS[:, :-1], use_cache=False, **options)
        targets = rows_BS[:, 1:].flatten()
        loss += torch.nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), targets, reduction="sum").item()
        steps, tokens = steps + int(output.recurrences.sum()), tokens + targets.numel()
    return loss / tokens, steps / tokens


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        speaker = open_model(arguments.load)
        if speaker.recurrences == 0:
            raise UserError(f"--load {arguments.load}: the model is dense and has no loop to leave")
        if not speaker.cached:
            raise UserError("adaptive exit needs the package: pip install transformers")
        samples = read_samples(arguments, speaker)
        most = arguments.num_recurrences or speaker.recurrences
        kl = arguments.exit_criterion == "kl"
        thresholds = arguments.thresholds or ([0.1, 0.03, 0.01, 0.003, 0.001] if kl else [0.3, 0.2, 0.1, 0.05, 0.02])
        print(f"{samples.numel():,} tokens\nexit                 steps a token    loss")
        for depth in range(most + 1):
            loss, steps = measure(speaker, samples, arguments.batch_size, {"num_recurrences": depth})
            print(f"{f'fixed {depth}':<20} {steps:>13.2f}  {loss:.4f}", flush=True)
        for threshold in sorted(thresholds, reverse=True):
            options = {"num_recurrences": most, "exit_threshold": threshold, "exit_criterion": arguments.exit_criterion}
            loss, steps = measure(speaker, samples, arguments.batch_size, options)
            print(f"{f'{arguments.exit_criterion} < {threshold:g}':<20} {steps:>13.2f}  {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
