"""Users' text to indexed datasets: streamed, in parallel, resumable, never half a pair that looks whole.

The parent cuts the inputs into chunks (`chunks`), workers tokenize them (`encode`), the parent writes the
results in order (`indexed_writer`): so the bytes do not depend on the number of workers. Every few seconds
it makes the part files durable and notes the position in a journal; a run that was killed and is started
again with the same flags goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_rgpt.data.chunks import Chunk, Cutter, Position
from megatron_rgpt.data.encode import Encoded, Encoder
from megatron_rgpt.data.indexed import best_dtype, bin_path, idx_path
from megatron_rgpt.data.indexed_writer import IndexedWriter, WriterState, part_paths
from megatron_rgpt.data.inputs import refuse_changed
from megatron_rgpt.data.job import Job, Progress
from megatron_rgpt.data.journal import Journal
from megatron_rgpt.data.manifest import Manifest, manifest_path, write_manifest
from megatron_rgpt.data.ordered_pool import OrderedPool
from megatron_rgpt.data.output import Output
from megatron_rgpt.data.skip_log import SkipLog, drop_if_empty, skip_log_path
from megatron_rgpt.errors import UserError

JOURNAL_SECONDS = 5.0
INPUTS_NAMED = 1000


def preprocess(job: Job, report: Callable[[Progress], None] = lambda progress: None) -> list[Manifest]:
    """Make the pairs of a job; returns their manifests. `report` is called after every chunk.

    Raises:
        UserError: output in the way, another process at work, a disk that is full; with `stop_on_error`
            also the first document that cannot be used. What is done so far stays for the next try.
    """
    journal = Journal(job)
    if not job.overwrite and (finished := journal.finished()) is not None:
        return finished
    journal.refuse_other_output()
    progress, states, manifests = journal.load()
    if manifests:
        _finish(job, _open_writers(job, states, finished=True), manifests, journal)
        return manifests
    dtype = best_dtype(job.tokenizer.vocab_size)
    encoder = Encoder(job.tokenizer, job.keys, append_eod=job.append_eod, dtype=dtype)
    # The workers are forked before the part files are open: one that outlives a killed parent for a moment
    # must not hold their locks.
    with OrderedPool(encoder, job.workers) as pool:
        writers = _open_writers(job, states, finished=False)
        output = Output(writers, encoder, SkipLog(job.output_prefix, progress.log_bytes))
        try:
            _convert(job, pool, journal, progress, output, report)
            manifests = _manifests(job, progress, writers)
            _save(journal, progress, output, manifests)
            _finish(job, writers, manifests, journal)
        finally:
            output.close()
    return manifests


def _open_writers(job: Job, states: list[WriterState], *, finished: bool) -> list[IndexedWriter]:
    """A writer for each pair; where all tokens are written, only for those that have no final name yet."""
    writers = []
    for prefix, state in zip(job.prefixes, states, strict=True):
        part = part_paths(prefix)[0]
        if finished and not part.exists():
            if idx_path(prefix).exists():
                continue
            # Killed between the two renames: take the name back and do both again.
            bin_path(prefix).rename(part)
        writers.append(IndexedWriter(prefix, best_dtype(job.tokenizer.vocab_size), resume_from=state))
    return writers


def _convert(
    job: Job,
    pool: OrderedPool[Chunk, Encoded],
    journal: Journal,
    progress: Progress,
    output: Output,
    report: Callable[[Progress], None],
) -> None:
    cutter = Cutter(job.files, job.keys, pieces=job.tokenizer.cuts_before_spaces)
    end = job.end or Position(len(job.files))
    saved = time.monotonic()
    for chunk, encoded in pool.map(cutter.chunks(progress.position, end, job.start), Chunk.held_bytes):
        skips = output.take(chunk, encoded)
        faults = [skip for skip in skips if not skip.harmless]
        if faults and job.stop_on_error:
            # The chunk with the fault is not behind us: the next try reads it again.
            raise UserError(
                f"{faults[0].where}: {faults[0].reason}: with --on-error skip the same command goes on from here "
                "and leaves such documents out; if you correct the input, --overwrite starts anew"
            )
        progress.add(chunk, skips, output.writers)
        if output.between_documents and time.monotonic() - saved >= JOURNAL_SECONDS:
            _save(journal, progress, output, [])
            saved = time.monotonic()
        report(progress)
    refuse_changed(job.files)


def _save(journal: Journal, progress: Progress, output: Output, manifests: list[Manifest]) -> None:
    """Make the output durable, then say so."""
    states, progress.log_bytes = output.sync()
    journal.save(progress, states, manifests)


def _finish(job: Job, writers: list[IndexedWriter], manifests: list[Manifest], journal: Journal) -> None:
    for writer in writers:
        manifest_path(writer.prefix).unlink(missing_ok=True)
        writer.finalize()
    for prefix, manifest in zip(job.prefixes, manifests, strict=True):
        write_manifest(prefix, manifest)
        for stray in part_paths(prefix):
            stray.unlink(missing_ok=True)
    drop_if_empty(skip_log_path(job.output_prefix))
    journal.remove()


def refuse_nothing(job: Job, documents: int, skipped: dict[str, int]) -> None:
    """Raises UserError where a run found no document at all; says what it left out."""
    if documents == 0:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.items()) or "none found"
        raise UserError(f"--input: no usable document in {len(job.files)} file(s): {reasons}")


def _manifests(job: Job, progress: Progress, writers: list[IndexedWriter]) -> list[Manifest]:
    if job.end is None:
        refuse_nothing(job, progress.documents, progress.skipped)
    manifests = []
    for writer in writers:
        state = writer.mark(durable=True)
        manifests.append(
            Manifest(
                tokenizer=job.tokenizer.name,
                tokenizer_fingerprint=job.tokenizer.fingerprint,
                vocab_size=job.tokenizer.vocab_size,
                eod=job.tokenizer.eod,
                append_eod=job.append_eod,
                dtype=writer.dtype.name,
                documents=state.documents,
                tokens=state.bin_bytes // writer.dtype.itemsize,
                bin_bytes=state.bin_bytes,
                max_id=state.max_id,
                content_hash=writer.content_hash(),
                run_key=job.run_key,
                input_bytes=sum(file.size for file in job.files),
                inputs=[file.path for file in job.files[:INPUTS_NAMED]],
                skipped=progress.skipped,
                skipped_examples=progress.skipped_examples,
            )
        )
    return manifests
