"""What the data tools' command lines share."""

from __future__ import annotations

import argparse

from megatron_rgpt.data.tokenizers import ALIASES, TOKENIZER_TYPES
from megatron_rgpt.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError for bad flags, so that a command says one line and leaves with code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message.removeprefix('argument ')} (--help lists the flags)")


def at_least_one(text: str) -> int:
    """The type of a flag that counts."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def add_tokenizer_flags(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """The flags of `build_tokenizer`."""
    group.add_argument("--tokenizer-type", required=required, help=", ".join([*TOKENIZER_TYPES, *ALIASES]))
    group.add_argument("--vocab-file", help="GPT-2's encoder.json")
    group.add_argument("--merge-file", help="GPT-2's vocab.bpe")
    group.add_argument("--tokenizer-model", help="model file, name of a tiktoken encoding, owner/name on the hub")
    group.add_argument("--vocab-size", type=int, help="for the null tokenizer and Megatron's tiktoken vocabularies")
