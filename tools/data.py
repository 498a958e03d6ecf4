"""Look at, check and combine `.bin/.idx` pairs. See `--help`; the work is in megatron_rgpt/data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_rgpt.config import TrainingConfig
from megatron_rgpt.config.schema import DataConfig
from megatron_rgpt.data.combine import merge, wrap
from megatron_rgpt.data.command_line import OneLineParser, add_tokenizer_flags
from megatron_rgpt.data.datasets import build_datasets, parse_paths, summary_lines
from megatron_rgpt.data.describe import document_ids, info_lines
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.manifest import check_tokenizer, read_manifest
from megatron_rgpt.data.progress_line import PercentLine
from megatron_rgpt.data.sample_index import SPLIT_NAMES
from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.data.verify import verify
from megatron_rgpt.errors import UserError, exit_on_user_error

BY_MANIFEST = "tokenizer (default: the manifest's, where its name says all)"


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Look at, check and combine .bin/.idx pairs.")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="counts, lengths of documents, splits")
    info.add_argument("prefix", nargs="+")
    info.add_argument("--split", default="969,30,1")

    show = commands.add_parser("show", help="decode a document, or a training sample of a run")
    show.add_argument("prefix", nargs="+", help="a prefix, or weight prefix weight prefix ... with --sample")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument("--document", type=int, metavar="N")
    which.add_argument("--sample", type=int, metavar="N", help="number in the run that the flags below describe")
    show.add_argument("--split-name", choices=SPLIT_NAMES, default="train")
    show.add_argument("--ids", action="store_true", help="token ids instead of text")
    add_tokenizer_flags(show.add_argument_group(BY_MANIFEST), required=False)
    add_run(show)

    merging = commands.add_parser("merge", help="append pairs to each other")
    merging.add_argument("prefix", nargs="+")
    merging.add_argument("--output-prefix", required=True)
    merging.add_argument("--overwrite", action="store_true")

    check = commands.add_parser("verify", help="structure, sizes, token ids, hash")
    check.add_argument("prefix", nargs="+")
    check.add_argument("--vocab-size", type=int, help="default: the manifest's")

    build = commands.add_parser(
        "prebuild", help="make the sample indexes of a coming run, check ids against --vocab-size"
    )
    build.add_argument("--data-path", nargs="+", default=[])
    for name in SPLIT_NAMES:
        build.add_argument(f"--{name}-data-path", nargs="+", default=[])
    add_tokenizer_flags(build.add_argument_group(BY_MANIFEST), required=False)
    add_run(build)

    wrapping = commands.add_parser("wrap", help="write the index of a raw token file such as nanoGPT's train.bin")
    wrapping.add_argument("file", type=Path)
    wrapping.add_argument("--dtype", default="uint16")
    wrapping.add_argument("--eod", type=int, help="id that ends a document; without it the file is one document")
    wrapping.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--seq-length", type=int, default=1024)
    group.add_argument("--seed", type=int, default=TrainingConfig().seed, help="the run's [%(default)s]")
    group.add_argument("--split", default="969,30,1")
    group.add_argument("--data-cache-path")
    group.add_argument("--data-index-timeout-minutes", type=float, default=10.0)
    for name in SPLIT_NAMES:
        group.add_argument(f"--{name}-samples", type=int, default=0)


def tokenizer_of(arguments: argparse.Namespace, prefix: str) -> Tokenizer:
    """The tokenizer that the flags name, else that of the manifest; held to the manifest."""
    manifest = read_manifest(prefix)
    kind = arguments.tokenizer_type or (manifest.tokenizer if manifest else None)
    if kind is None:
        raise UserError(f"{prefix} has no manifest: give --tokenizer-type")
    tokenizer = build_tokenizer(
        kind.split(":")[0],
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
    )
    check_tokenizer(prefix, tokenizer)
    return tokenizer


def run_flags(arguments: argparse.Namespace, data_path: list[str], **paths: tuple[str, ...]) -> DataConfig:
    given = {"tokenizer_type": arguments.tokenizer_type} if arguments.tokenizer_type else {}
    return DataConfig(
        data_path=tuple(data_path),
        split=arguments.split,
        data_cache_path=arguments.data_cache_path,
        data_index_timeout_minutes=arguments.data_index_timeout_minutes,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
        **given,
        **paths,
    )


def show(arguments: argparse.Namespace) -> None:
    if arguments.sample is None:
        if len(arguments.prefix) != 1:
            raise UserError("--document: give one prefix")
        prefix = arguments.prefix[0]
        ids = document_ids(IndexedDataset(prefix), arguments.document)
    else:
        prefix = parse_paths("--sample", arguments.prefix)[0][0]
        arguments.tokenizer_type = arguments.tokenizer_type or tokenizer_of(arguments, prefix).name.split(":")[0]
        wanted = [getattr(arguments, f"{name}_samples") for name in SPLIT_NAMES]
        number = SPLIT_NAMES.index(arguments.split_name)
        # The order depends on how many samples the run has; without that flag, one that ends with this one.
        wanted = [(count or arguments.sample + 1) if i == number else 0 for i, count in enumerate(wanted)]
        flags = run_flags(arguments, arguments.prefix)
        built = build_datasets(
            flags, seq_length=arguments.seq_length, seed=arguments.seed, samples=(wanted[0], wanted[1], wanted[2])
        )[number]
        assert built is not None
        if not 0 <= arguments.sample < len(built):
            raise UserError(f"--sample {arguments.sample}: there are {len(built)}")
        print(f"# {built.describe(arguments.sample)}", file=sys.stderr)
        ids = built[arguments.sample]
    print(" ".join(map(str, ids)) if arguments.ids else tokenizer_of(arguments, prefix).decode(ids.tolist()))


def prebuild(arguments: argparse.Namespace) -> None:
    paths = {f"{name}_data_path": tuple(getattr(arguments, f"{name}_data_path")) for name in SPLIT_NAMES}
    words = arguments.data_path or arguments.train_data_path
    prefixes = parse_paths("--data-path", words)[0] if words else ()
    known = next((prefix for prefix in prefixes if read_manifest(prefix)), None)
    if known and not arguments.tokenizer_type:
        arguments.tokenizer_type = tokenizer_of(arguments, known).name.split(":")[0]
    flags = run_flags(arguments, arguments.data_path, **paths)
    samples = (arguments.train_samples, arguments.valid_samples, arguments.test_samples)
    if not any(samples):
        raise UserError("--train-samples, --valid-samples, --test-samples: say how many samples the run will have")
    built = build_datasets(
        flags,
        seq_length=arguments.seq_length,
        seed=arguments.seed,
        samples=samples,
        vocab_size=arguments.vocab_size,
    )
    print("\n".join(summary_lines(flags, built)))


def main() -> None:
    with exit_on_user_error():
        arguments = parse_arguments()
        if arguments.command == "info":
            for prefix in arguments.prefix:
                print("\n".join(info_lines(IndexedDataset(prefix), arguments.split)))
        elif arguments.command == "show":
            show(arguments)
        elif arguments.command == "merge":
            merge(
                arguments.prefix,
                arguments.output_prefix,
                lambda prefix: print(f"+ {prefix}", file=sys.stderr),
                overwrite=arguments.overwrite,
            )
            print("\n".join(info_lines(IndexedDataset(arguments.output_prefix), "1,0,0")))
        elif arguments.command == "verify":
            for prefix in arguments.prefix:
                lines = verify(prefix, arguments.vocab_size, PercentLine(prefix).update)
                print("\n".join([f"{prefix}: whole", *(f"  {line}" for line in lines)]))
        elif arguments.command == "prebuild":
            prebuild(arguments)
        else:
            dataset = wrap(arguments.file, arguments.dtype, arguments.eod, overwrite=arguments.overwrite)
            print("\n".join(info_lines(dataset, "969,30,1")))


if __name__ == "__main__":
    main()
