"""A preprocessing run in several independent parts, for inputs that one reader cannot feed to many workers.

The input is cut into as many spans of about equal size, each span becomes a pair of its own with its own
journal, and the pairs are merged in order: the bytes are those of a run in one part.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megatron_rgpt.data.chunks import Position
from megatron_rgpt.data.combine import merge_manifests
from megatron_rgpt.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.inputs import InputFile
from megatron_rgpt.data.job import SKIPS_NAMED, Job, Progress
from megatron_rgpt.data.journal import Journal
from megatron_rgpt.data.manifest import Manifest, manifest_path, write_manifest
from megatron_rgpt.data.preprocess import preprocess, refuse_nothing
from megatron_rgpt.data.skip_log import join_skip_logs
from megatron_rgpt.errors import UserError

Report = Callable[[Progress], None]


def preprocess_in_parts(job: Job, partitions: int, report: Report) -> list[Manifest]:
    """As `preprocess`, with `partitions` readers that share the job's workers.

    Raises:
        UserError: as `preprocess`; the other parts stop too, and all go on at the next try.
    """
    parts = part_jobs(job, partitions)
    journal = Journal(job)
    manifests = None if job.overwrite else journal.finished()
    if manifests is None:
        if not any(_started(part) for part in parts):
            journal.refuse_other_output()
        of_parts = _run_all(parts, report)
        manifests = [_merge(job, key, [found[key] for found in of_parts], parts) for key in range(len(job.keys))]
    join_skip_logs(job.output_prefix, [part.output_prefix for part in parts])
    for part in parts:
        for prefix in part.prefixes:
            for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)):
                path.unlink(missing_ok=True)
    return manifests


def part_jobs(job: Job, partitions: int) -> list[Job]:
    """The job's parts, fewer where the input has too few borders."""
    borders = [Position(), *span_borders(job.files, partitions), Position(len(job.files))]
    count = len(borders) - 1
    return [
        replace(
            job,
            output_prefix=f"{job.output_prefix}.partition{number + 1}of{count}",
            start=borders[number],
            end=borders[number + 1],
            workers=max(1, job.workers // count),
        )
        for number in range(count)
    ]


def span_borders(files: Sequence[InputFile], spans: int) -> list[Position]:
    """Where to cut the input into spans of about equal size on disk: between files, or lines of plain JSONL."""
    total = sum(file.size for file in files)
    borders: list[Position] = []
    number = passed = 0
    for span in range(1, spans):
        target = total * span // spans
        while passed + files[number].size <= target and number < len(files) - 1:
            passed += files[number].size
            number += 1
        border = _border_within(files[number], number, target - passed)
        if border != Position() and border != Position(len(files)) and border not in borders:
            borders.append(border)
    return borders


def _border_within(file: InputFile, number: int, target: int) -> Position:
    if file.format != "jsonl" or file.compressed:
        return Position(number + (target > file.size // 2))
    if target == 0:
        return Position(number)
    with open(file.path, "rb") as stream:
        stream.seek(target - 1)
        stream.readline()
        offset = stream.tell()
    return Position(number, offset) if offset < file.size else Position(number + 1)


def _started(part: Job) -> bool:
    folder = Path(part.output_prefix).parent
    return folder.is_dir() and any(folder.glob(f"{Path(part.output_prefix).name}*"))


def _run_all(parts: list[Job], report: Report) -> list[list[Manifest]]:
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for part in parts:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_part, args=(part, theirs, [*pipes, ours]))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results: dict[Connection, list[Manifest]] = {}
    progress = {pipe: Progress() for pipe in pipes}
    try:
        while len(results) < len(pipes):
            for pipe in wait([pipe for pipe in pipes if pipe not in results]):
                message = _receive(pipe)  # type: ignore[arg-type]
                if isinstance(message, list):
                    results[pipe] = message  # type: ignore[index]
                elif isinstance(message, Progress):
                    progress[pipe] = message  # type: ignore[index]
                    report(_sum(list(progress.values())))
    finally:
        # A part notices at its next report that nobody listens any more, and leaves its journal behind.
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
    return [results[pipe] for pipe in pipes]


def _receive(pipe: Connection) -> object:
    try:
        message = pipe.recv()
    except EOFError:
        raise UserError(
            "--partitions: a part died without a word, most often for want of memory: use fewer workers; "
            "the same command goes on from here"
        ) from None
    if isinstance(message, UserError):
        raise message
    if isinstance(message, str):
        raise RuntimeError(f"a part failed:\n{message}")
    return message


def _run_part(part: Job, pipe: Connection, parents_ends: list[Connection]) -> None:
    for end in parents_ends:
        end.close()
    try:
        pipe.send(preprocess(part, pipe.send))
    except BrokenPipeError:
        return
    except UserError as error:
        pipe.send(error)
    except Exception:
        pipe.send(traceback.format_exc())


def _sum(parts: list[Progress]) -> Progress:
    return Progress(
        input_bytes=sum(part.input_bytes for part in parts),
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        skipped=dict(sum((Counter(part.skipped) for part in parts), Counter())),
        skipped_examples=[example for part in parts for example in part.skipped_examples][:SKIPS_NAMED],
    )


def _merge(job: Job, key: int, manifests: list[Manifest], parts: list[Job]) -> Manifest:
    manifest = merge_manifests(manifests, "", job.run_key)
    refuse_nothing(job, manifest.documents, manifest.skipped)
    prefix = job.prefixes[key]
    manifest_path(prefix).unlink(missing_ok=True)
    datasets = [IndexedDataset(part.prefixes[key]) for part in parts]
    with IndexedWriter(prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
    manifest = replace(manifest, content_hash=writer.content_hash())
    write_manifest(prefix, manifest)
    return manifest
