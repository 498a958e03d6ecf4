#!/usr/bin/env python
"""Look at, check and compare checkpoints: a run's folder means its latest one, or name one as RUN/iter_0000200.

Exit code 0: whole, or equal. 1: `verify` or `diff` found a damage or a difference. 2: bad input.
"""

from __future__ import annotations

import argparse
import sys

from megatron_rgpt.checkpoint.inspect import differences, find, info_lines, verify
from megatron_rgpt.checkpoint.layout import DamagedCheckpoint
from megatron_rgpt.data.command_line import OneLineParser
from megatron_rgpt.errors import exit_on_user_error

FOUND = 1


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="iteration, samples, model, parameters, sizes, files")
    info.add_argument("checkpoint")
    check = commands.add_parser("verify", help="sizes, names, shapes, hashes; exit code 1 if one is wrong")
    check.add_argument("checkpoint")
    diff = commands.add_parser("diff", help="per tensor max |Δ| and ‖Δ‖/‖B‖; exit code 1 if any differs")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    return parser.parse_args()


def check(path: str) -> int:
    try:
        folder = find(path)
        index = verify(folder)
    except DamagedCheckpoint as damage:
        print(f"error: {damage}", file=sys.stderr)
        return FOUND
    print(f"{folder}: whole (iteration {index.iteration}, {len(index.files)} files, sizes, shapes and hashes agree)")
    return 0


def compare(a: str, b: str) -> int:
    lines, tensors = differences(find(a), find(b))
    print("\n".join([*lines, f"{tensors - len(lines)} of {tensors} tensors are equal"]))
    return FOUND if lines else 0


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        if arguments.command == "info":
            print("\n".join(info_lines(find(arguments.checkpoint))))
        elif arguments.command == "verify":
            sys.exit(check(arguments.checkpoint))
        else:
            sys.exit(compare(arguments.a, arguments.b))


if __name__ == "__main__":
    main()
