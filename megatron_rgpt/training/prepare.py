"""Everything that can be checked before ranks meet: sizes, data, the checkpoint to load, the folder to save to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rgpt.checkpoint.fits import check_fits
from megatron_rgpt.checkpoint.layout import (
    CheckpointIndex,
    check_folder_can_be_made,
    find_checkpoint,
    prepare_run_folder,
    read_index,
)
from megatron_rgpt.config import BatchPlan, Config, plan_batch
from megatron_rgpt.data.datasets import Dataset, build_datasets, check_extension
from megatron_rgpt.data.indexed import IndexedDataset
from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.counts import count_parameters
from megatron_rgpt.parallel.mesh import MeshShape
from megatron_rgpt.pipeline.configure import PipelinePlan, configure_pipeline
from megatron_rgpt.training.deepspeed_config import deepspeed_config
from megatron_rgpt.training.feed import Documents


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that a run starts from."""

    folder: Path
    index: CheckpointIndex
    weights_only: bool
    """Finetuning: the run starts at iteration 0 with these weights."""


@dataclass(frozen=True)
class ResolvedRun:
    """What the configuration alone says of a run. In `config` nothing is left to a default."""

    config: Config
    batch: BatchPlan
    mesh_shape: MeshShape
    pipeline: PipelinePlan | None

    @property
    def vocab_size(self) -> int:
        return self.config.data.vocab_size


@dataclass(frozen=True)
class PreparedRun(ResolvedRun):
    """A run whose inputs are known to be good."""

    checkpoint: Checkpoint | None
    start_iteration: int
    consumed_samples: int
    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    documents: Documents | None
    """None: documents run into each other, as in the paper."""


def resolve_config(config: Config, world_size: int, given: frozenset[str] = frozenset()) -> ResolvedRun:
    """Fill in what depends on the machine, the tokenizer and the run to go on with; check all sizes.

    `given` names the fields that the user set. Reads no data. Raises `UserError`.
    """
    precision = config.training.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    config = config.changed(precision=precision, vocab_size=resolve_vocabulary(config))
    checkpoint = _find(config)
    inherited = None
    if checkpoint is not None and not checkpoint.weights_only and "depths_per_step" not in given:
        # D is part of the run: the default would change with the number of ranks
        inherited = checkpoint.index.depths_per_step
        config = config.changed(depths_per_step=inherited)
    parallel = config.parallel
    mesh_shape = MeshShape.of(
        world_size, tensor=parallel.tensor_model_parallel_size, pipeline=parallel.pipeline_model_parallel_size
    )
    try:
        batch = plan_batch(config, mesh_shape.data)
    except UserError as error:
        if inherited is None:
            raise
        raise UserError(
            f"{error}; D = {inherited} comes from the run in {checkpoint.folder}: another --depths-per-step goes on "
            "with other depths"
        ) from None
    deepspeed_config(config, batch)
    config = config.changed(global_batch_size=batch.global_batch_size)
    if not config.model.layout.is_dense:
        config = config.changed(depths_per_step=batch.depths_per_step)
    pipeline = configure_pipeline(config, batch)
    return ResolvedRun(config, batch, mesh_shape, pipeline)


def resolve_vocabulary(config: Config) -> int:
    """`--vocab-size`, or the tokenizer's."""
    return _tokenizer(config).vocab_size if config.data.vocab_size is None else config.data.vocab_size


def _tokenizer(config: Config) -> Tokenizer:
    data = config.data
    return build_tokenizer(
        data.tokenizer_type,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_model=data.tokenizer_model,
        vocab_size=data.vocab_size,
    )


def _documents(config: Config) -> Documents | None:
    data = config.data
    if not (data.reset_position_ids or data.eod_mask_loss):
        return None
    eod = _tokenizer(config).eod
    if eod is None:
        raise UserError(
            f"--reset-position-ids and --eod-mask-loss need an end-of-document token, and --tokenizer-type "
            f"{data.tokenizer_type} has none: leave them out"
        )
    return Documents(eod, data.reset_position_ids, data.eod_mask_loss)


def check_complete(run: ResolvedRun) -> None:
    """Raise `UserError` for what a run needs and a dry run does not."""
    config = run.config
    if run.batch.train_iters == 0 and not config.training.skip_train:
        raise UserError("how long to train? give --train-iters N or --train-samples N")
    for flag in ("save_interval", "save_total_limit"):
        value = getattr(config.checkpoint, flag)
        if value is not None and config.checkpoint.save is None:
            raise UserError(f"--{flag.replace('_', '-')} {value} needs --save FOLDER: nothing would be saved")


def check_inputs(run: ResolvedRun) -> str:
    """For a dry run, which makes nothing: check checkpoint, save folder and data, and say how far the data could be."""
    config, data = run.config, run.config.data
    checkpoint = _find(config)
    if checkpoint is not None:
        check_fits(checkpoint.folder, checkpoint.index, config.model, run.vocab_size)
    if config.checkpoint.save is not None:
        check_folder_can_be_made(config.checkpoint.save)
    words = [*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path]
    prefixes = [word for word in words if not _is_number(word)]
    absent = [prefix for prefix in prefixes if not Path(f"{prefix}.idx").exists()]
    if not prefixes:
        return "none given"
    if absent:
        return f"not checked, {', '.join(absent)} is not on this machine"
    prepare(run, first_rank=False)
    return "checked"


def prepare(run: ResolvedRun, *, first_rank: bool) -> PreparedRun:
    """Open the data and the checkpoint of a resolved run. The first rank also prepares the save folder."""
    config, batch = run.config, run.batch
    training, evaluation = config.training, config.evaluation
    checkpoint = _find(config)
    if checkpoint is not None:
        check_fits(checkpoint.folder, checkpoint.index, config.model, config.data.vocab_size)
    start = (0, 0) if checkpoint is None or checkpoint.weights_only else _position(config, batch, checkpoint)
    eval_samples = evaluation.eval_iters * batch.global_batch_size
    train, valid, test = build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        seed=training.seed,
        samples=(
            0 if training.skip_train else batch.train_samples,
            eval_samples,
            eval_samples if config.data.test_data_path else 0,
        ),
        vocab_size=config.data.vocab_size,
    )
    if config.checkpoint.save is not None and first_rank:
        # from an older checkpoint of its own, too: the later ones are replaced as the run comes by
        folders = [] if checkpoint is None else [checkpoint.folder.parent]
        folders += [] if config.checkpoint.load is None else [config.checkpoint.load]
        resuming = any(_same(config.checkpoint.save, folder) for folder in folders)
        resuming = resuming and not (checkpoint is not None and checkpoint.weights_only)
        total = count_parameters(config.model, config.data.vocab_size).total
        prepare_run_folder(config.checkpoint.save, total, resuming=resuming)
    documents = _documents(config)
    return PreparedRun(config, batch, run.mesh_shape, run.pipeline, checkpoint, *start, train, valid, test, documents)


def run_past(config: Config) -> dict[str, Any]:
    """By flag, what decides which samples a run sees, and in which order; the data by its size, not by its path."""
    data = config.data
    words = data.train_data_path or data.data_path
    sizes = [word if _is_number(word) else _size(IndexedDataset(word)) for word in words]
    flag = "train-data-path" if data.train_data_path else "data-path"
    past = {"global-batch-size": config.training.global_batch_size, flag: sizes}
    return past if data.train_data_path else {**past, "split": data.split}


def _size(indexed: IndexedDataset) -> str:
    return f"{len(indexed)} sequences of {indexed.num_tokens} tokens"


def _find(config: Config) -> Checkpoint | None:
    """The checkpoint that a run starts from; None for a new run, also one that will save to the folder of `--load`."""
    load, save, finetune = config.checkpoint.load, config.checkpoint.save, config.checkpoint.finetune
    if load is None:
        return None
    if finetune and save is not None and not _same(load, save):
        # submitted again: it has begun, and goes on from where it saves
        begun = find_checkpoint(save)
        if begun is not None:
            return Checkpoint(begun, read_index(begun), weights_only=False)
    folder = find_checkpoint(load)
    if folder is not None:
        return Checkpoint(folder, read_index(folder), weights_only=finetune)
    if save is not None and _same(load, save):
        return None
    raise UserError(f"--load {load}: no checkpoint there (no `latest`, no checkpoint.json): check the folder")


def _position(config: Config, batch: BatchPlan, checkpoint: Checkpoint) -> tuple[int, int]:
    """Iteration and consumed samples to go on from; the past of the run must stay what it was."""
    index = checkpoint.index
    if config.training.skip_train:
        return index.iteration, index.consumed_samples
    for flag, theirs in {"seed": index.seed, **index.past}.items():
        ours = {"seed": config.training.seed, **run_past(config)}.get(flag)
        if ours != theirs:
            raise UserError(
                f"--{flag} {_shown(ours)}: the run in {checkpoint.folder} has {_shown(theirs)}, and another one would "
                "change which samples it has seen: give the same, or --finetune to start anew"
            )
    if batch.train_iters < index.iteration:
        raise UserError(
            f"--train-iters {batch.train_iters}: the run in {checkpoint.folder} is past that, at iteration "
            f"{index.iteration}"
        )
    check_extension(
        config.data,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        before=index.train_samples,
        after=batch.train_samples,
        multiple=batch.global_batch_size,
    )
    return index.iteration, index.consumed_samples


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
