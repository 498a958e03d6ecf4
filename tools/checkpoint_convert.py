#!/usr/bin/env python
"""Checkpoints to Hugging Face folders and back.

export: any checkpoint of a run becomes a folder for AutoModelForCausalLM.from_pretrained (a dense model a stock
GPT2LMHeadModel). import: such a folder, or a stock GPT-2, becomes a checkpoint that training goes on from. Both are
loaded back and compared, logits at every exit, before they count.
"""

from __future__ import annotations

import argparse
import re

from megatron_rgpt.data.command_line import OneLineParser
from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.hf.configuration_recurrent_gpt import KV_SHARING
from megatron_rgpt.hf.export import DTYPES, ExportOptions, export
from megatron_rgpt.hf.import_folder import import_folder


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a checkpoint to a Hugging Face folder")
    out.add_argument("--load", required=True, metavar="FOLDER", help="a run's folder or one checkpoint's")
    out.add_argument("--output", required=True, metavar="FOLDER", help="the new Hugging Face folder")
    out.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="precision of the weights [fp32]")
    out.add_argument("--max-shard-size", type=_bytes, default="5GB", metavar="SIZE", help="bytes per file [5GB]")
    out.add_argument("--kv-sharing", choices=KV_SHARING, default="full", help="the model's default KV cache [full]")
    back = commands.add_parser("import", help="a Hugging Face folder to a checkpoint")
    back.add_argument("--load", required=True, metavar="FOLDER", help="the Hugging Face folder")
    back.add_argument("--save", required=True, metavar="FOLDER", help="the run folder to make")
    return parser.parse_args()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 500MB or 5GB")
    return size


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        if arguments.command == "export":
            options = ExportOptions(arguments.dtype, arguments.max_shard_size, arguments.kv_sharing)
            report = export(arguments.load, arguments.output, options)
            print(f"{report.architecture} written to {report.folder}")
            if report.tokenizer is not None:
                print(f"without a tokenizer: {report.tokenizer}")
        else:
            report = import_folder(arguments.load, arguments.save)
            print(f"checkpoint written to {report.checkpoint}; train on from it with")
            print(f"  pretrain_rgpt.py --load {arguments.save} --finetune {report.flags} ...")
        print("logits of a clean process against ours, largest difference over largest logit:")
        for exit_, difference in zip(report.agreement.exits, report.agreement.differences, strict=True):
            print(f"  exit {exit_}: {difference:.1e}")


if __name__ == "__main__":
    main()
