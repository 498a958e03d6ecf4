"""The journal of a preprocessing run: what of it is durable on disk, for the next try after a kill."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from megatron_rgpt.data.chunks import Position
from megatron_rgpt.data.indexed import idx_path
from megatron_rgpt.data.indexed_writer import WriterState
from megatron_rgpt.data.job import Job, Progress
from megatron_rgpt.data.manifest import Manifest, read_manifest, write_json
from megatron_rgpt.errors import UserError


class Journal:
    """`OUTPUT_PREFIX.resume.json`: the position that is durable in the part files, and whose run it is."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_key = job.run_key
        self._path = Path(f"{job.output_prefix}.resume.json")

    def finished(self) -> list[Manifest] | None:
        """The manifests, if this very run was finished before."""
        if self._path.exists() or not all(idx_path(prefix).exists() for prefix in self._job.prefixes):
            return None
        manifests = [read_manifest(prefix) for prefix in self._job.prefixes]
        found = [manifest for manifest in manifests if manifest is not None and manifest.run_key == self._run_key]
        return found if len(found) == len(manifests) else None

    def refuse_other_output(self) -> None:
        """Raises UserError where a pair stands in the way that this run did not make."""
        present = [prefix for prefix in self._job.prefixes if idx_path(prefix).exists()]
        if present and not self._path.exists() and not self._job.overwrite:
            raise UserError(
                f"--output-prefix {self._job.output_prefix}: {idx_path(present[0])} exists and was made from other "
                "input or with other flags: choose another prefix, or pass --overwrite"
            )

    def load(self) -> tuple[Progress, list[WriterState], list[Manifest]]:
        """Progress and the writers' states to go on from; the manifests too, if only the renaming is left."""
        fresh = Progress(self._job.start), [WriterState() for _ in self._job.keys], []
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
