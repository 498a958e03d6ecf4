"""Tokenize JSONL or text files into a `.bin/.idx` pair. See `--help` and megatron_rgpt/data/preprocess.py."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_rgpt.data.command_line import OneLineParser, add_tokenizer_flags, at_least_one
from megatron_rgpt.data.inputs import FORMATS, list_inputs
from megatron_rgpt.data.job import Job, Progress
from megatron_rgpt.data.partitions import preprocess_in_parts
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.progress_line import ProgressLine
from megatron_rgpt.data.skip_log import skip_log_path
from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import exit_on_user_error

EXAMPLES = 10


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Tokenize JSONL or text into OUTPUT_PREFIX_KEY_document.bin and .idx.")
    source = parser.add_argument_group("input")
    source.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders or globs; .gz and .zst too"
    )
    source.add_argument("--input-format", choices=FORMATS, default="auto", help="auto: by the file's name")
    source.add_argument("--suffix", nargs="+", default=[], help="which files of a folder to take, as in .py .txt")
    source.add_argument("--exclude", nargs="+", default=[], help="names to leave out below a folder, patterns allowed")
    source.add_argument("--json-keys", nargs="+", default=["text"], help="a pair is made for each key")
    source.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="a document that cannot be used")
    tokenizer = parser.add_argument_group("tokenizer")
    add_tokenizer_flags(tokenizer, required=True)
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end token")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True)
    output.add_argument("--overwrite", action="store_true", help="replace the output of other input or flags")
    output.add_argument("--workers", type=at_least_one, default=os.cpu_count() or 1, help="processes that tokenize")
    output.add_argument("--partitions", type=at_least_one, default=1, help="independent readers that share the workers")
    return parser.parse_args()


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        files = list_inputs(
            arguments.input,
            suffixes=arguments.suffix,
            exclude=arguments.exclude,
            file_format=arguments.input_format,
        )
        job = Job(
            files=files,
            output_prefix=arguments.output_prefix,
            tokenizer=build_tokenizer(
                arguments.tokenizer_type,
                vocab_file=arguments.vocab_file,
                merge_file=arguments.merge_file,
                tokenizer_model=arguments.tokenizer_model,
                vocab_size=arguments.vocab_size,
            ),
            keys=arguments.json_keys,
            append_eod=arguments.append_eod,
            workers=arguments.workers,
            stop_on_error=arguments.on_error == "stop",
            overwrite=arguments.overwrite,
        )
        line = ProgressLine(sum(file.size for file in files))
        last = Progress()

        def report(progress: Progress) -> None:
            nonlocal last
            last = progress
            line.update(progress.input_bytes, progress.documents, progress.tokens)

        if arguments.partitions > 1:
            manifests = preprocess_in_parts(job, arguments.partitions, report)
        else:
            manifests = preprocess(job, report)
        if last.documents:
            line.finish(last.input_bytes, last.documents, last.tokens)
        for prefix, manifest in zip(job.prefixes, manifests, strict=True):
            print(f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.dtype}")
            for reason, count in manifest.skipped.items():
                print(f"  left out {count:,}: {reason}")
            for example in manifest.skipped_examples[:EXAMPLES]:
                print(f"    {example}")
        if skip_log_path(job.output_prefix).exists():
            print(f"  all that was left out: {skip_log_path(job.output_prefix)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on from here")
