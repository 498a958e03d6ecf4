"""Users' text to indexed datasets: streamed, in parallel, resumable, never half a pair that looks whole.

The parent cuts the inputs into chunks (`chunks`), workers tokenize them (`encode`), the parent writes the
results in order (`indexed_writer`): so the bytes do not depend on the number of workers. Every few seconds
it makes the part files durable and notes the position in a journal; a run that was killed and is started
again with the same flags goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_rgpt.data.chunks import Chunk, Position, cut
from megatron_rgpt.data.encode import Encoded, Encoder
from megatron_rgpt.data.indexed import best_dtype, bin_path, idx_path
from megatron_rgpt.data.indexed_writer import IndexedWriter, WriterState, part_paths
from megatron_rgpt.data.inputs import InputFile, absolute
from megatron_rgpt.data.manifest import Manifest, manifest_path, read_manifest, write_json, write_manifest
from megatron_rgpt.data.ordered_pool import OrderedPool
from megatron_rgpt.data.tokenizers.base import Tokenizer
from megatron_rgpt.errors import UserError

JOURNAL_SECONDS = 5.0
SKIPS_NAMED = 100
INPUTS_NAMED = 1000


@dataclass(frozen=True)
class Job:
    """What to make of what. The pairs are named `OUTPUT_PREFIX_KEY_document` after each of `keys`."""

    files: Sequence[InputFile]
    output_prefix: str
    tokenizer: Tokenizer
    keys: Sequence[str] = ("text",)
    append_eod: bool = False
    workers: int = 1
    stop_on_error: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eod is None:
            raise UserError(f"--append-eod: tokenizer {self.tokenizer.name} has no end-of-document token")
        if len(set(self.keys)) != len(self.keys) or not self.keys:
            raise UserError(f"--json-keys {' '.join(self.keys)}: give each key once")

    @property
    def prefixes(self) -> list[str]:
        return [f"{self.output_prefix}_{key}_document" for key in self.keys]

    @property
    def run_key(self) -> str:
        """A hash of all that decides the output: inputs, tokenizer, keys; not workers, not --on-error."""
        content = [
            absolute(self.files),
            [file.format for file in self.files],
            self.tokenizer.fingerprint,
            self.tokenizer.vocab_size,
            list(self.keys),
            self.append_eod,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Progress:
    """Where a run stands. Bytes are those of the input files on disk."""

    position: Position = field(default_factory=Position)
    input_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: list[str] = field(default_factory=list)

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        self.position = chunk.end
        self.input_bytes += chunk.disk_bytes
        self.documents += len(encoded.lengths[0])
        self.tokens += sum(len(ids) for ids in encoded.tokens)
        for skip in encoded.skips:
            # The reason's first words: what follows a colon is about the one document.
            reason = skip.reason.split(":")[0].split(" at byte")[0]
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            if len(self.skipped_examples) < SKIPS_NAMED:
                self.skipped_examples.append(f"{skip.where}: {skip.reason}")


def preprocess(job: Job, report: Callable[[Progress], None] = lambda progress: None) -> list[Manifest]:
    """Make the pairs of a job; returns their manifests. `report` is called after every chunk.

    Raises:
        UserError: output in the way, another process at work, a disk that is full; with `stop_on_error`
            also the first document that cannot be used. What is done so far stays for the next try.
    """
    journal = Journal(job)
    if (finished := journal.already_finished()) is not None:
        return finished
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
        try:
            _convert(job, pool, journal, progress, writers, report)
            manifests = _manifests(job, progress, writers)
            journal.save(progress, [writer.mark(durable=True) for writer in writers], manifests)
            _finish(job, writers, manifests, journal)
        finally:
            for writer in writers:
                writer.close()
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
    writers: list[IndexedWriter],
    report: Callable[[Progress], None],
) -> None:
    saved = time.monotonic()
    for chunk, encoded in pool.map(cut(job.files, progress.position)):
        faults = [skip for skip in encoded.skips if not skip.harmless]
        if faults and job.stop_on_error:
            journal.save(progress, [writer.mark(durable=True) for writer in writers], [])
            raise UserError(
                f"{faults[0].where}: {faults[0].reason}: with --on-error skip the same command goes on from here "
                "and leaves such documents out; if you correct the input, --overwrite starts anew"
            )
        for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths, strict=True):
            writer.add_documents(tokens, lengths)
        progress.add(chunk, encoded)
        if time.monotonic() - saved >= JOURNAL_SECONDS:
            journal.save(progress, [writer.mark(durable=True) for writer in writers], [])
            saved = time.monotonic()
        report(progress)


def _finish(job: Job, writers: list[IndexedWriter], manifests: list[Manifest], journal: Journal) -> None:
    for writer in writers:
        manifest_path(writer.prefix).unlink(missing_ok=True)
        writer.finalize()
    for prefix, manifest in zip(job.prefixes, manifests, strict=True):
        write_manifest(prefix, manifest)
        for stray in part_paths(prefix):
            stray.unlink(missing_ok=True)
    journal.remove()


def _manifests(job: Job, progress: Progress, writers: list[IndexedWriter]) -> list[Manifest]:
    if progress.documents == 0:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in progress.skipped.items()) or "none found"
        raise UserError(f"--input: no usable document in {len(job.files)} file(s): {reasons}")
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


class Journal:
    """`OUTPUT_PREFIX.resume.json`: the position that is durable in the part files, and whose run it is."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_key = job.run_key
        self._path = Path(f"{job.output_prefix}.resume.json")

    def already_finished(self) -> list[Manifest] | None:
        """The manifests, if this very run was finished before. Raises UserError if other output is there."""
        if self._path.exists() or self._job.overwrite:
            return None
        present = [prefix for prefix in self._job.prefixes if idx_path(prefix).exists()]
        if not present:
            return None
        manifests = [read_manifest(prefix) for prefix in self._job.prefixes]
        found = [manifest for manifest in manifests if manifest is not None and manifest.run_key == self._run_key]
        if len(found) == len(manifests):
            return found
        raise UserError(
            f"--output-prefix {self._job.output_prefix}: {idx_path(present[0])} exists and was made from other "
            "input or with other flags: choose another prefix, or pass --overwrite"
        )

    def load(self) -> tuple[Progress, list[WriterState], list[Manifest]]:
        """Progress and the writers' states to go on from; the manifests too, if only the renaming is left."""
        fresh = Progress(), [WriterState() for _ in self._job.keys], []
        try:
            content = json.loads(self._path.read_text("utf-8"))
            if content["run_key"] != self._run_key:
                if self._job.overwrite:
                    return fresh
                raise UserError(
                    f"{self._path}: an unfinished run with other input or other flags: repeat those to finish it, "
                    "or pass --overwrite to start anew"
                )
            progress = Progress(**{**content["progress"], "position": Position(**content["progress"]["position"])})
            states = [WriterState(**state) for state in content["writers"]]
            return progress, states, [Manifest(**manifest) for manifest in content["manifests"]]
        except FileNotFoundError:
            return fresh
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self._path}: damaged ({error!r}): delete it to start anew") from None

    def save(self, progress: Progress, states: list[WriterState], manifests: list[Manifest]) -> None:
        content: dict[str, object] = {
            "run_key": self._run_key,
            "progress": asdict(progress),
            "writers": [asdict(state) for state in states],
            "manifests": [asdict(manifest) for manifest in manifests],
        }
        write_json(self._path, content)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
