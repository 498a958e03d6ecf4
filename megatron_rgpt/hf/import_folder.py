"""A Hugging Face folder as one of our checkpoints, which `--load RUN --finetune` trains on.

Takes our own exports and stock GPT-2. The folder's own code is never run: a recurrent model is checked with ours.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rgpt.checkpoint import layout
from megatron_rgpt.checkpoint.fits import model_facts
from megatron_rgpt.checkpoint.layout import CheckpointIndex
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.config import Config, ModelConfig
from megatron_rgpt.config.flags import to_yaml
from megatron_rgpt.errors import UserError
from megatron_rgpt.hf.export import copy_code
from megatron_rgpt.hf.hf_config import CONFIG, from_hf, read_hf_config, to_hf
from megatron_rgpt.hf.names import HFTensor, hf_tensors, logical_parameters
from megatron_rgpt.hf.shards import FolderTensors, save_tensors
from megatron_rgpt.hf.tokenizer_files import TRAINED_WITH, run_tokenizer
from megatron_rgpt.hf.verify import Agreement, verify_folder
from megatron_rgpt.model.recurrent import RecurrentTransformer

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_WEIGHTS = "weights-00000-of-00001.safetensors"


@dataclass(frozen=True)
class ImportReport:
    """What was made of a folder, and how closely transformers agrees with it."""

    checkpoint: Path
    config: Config
    agreement: Agreement

    @property
    def flags(self) -> str:
        """The flags of the main job that describe this model."""
        model, data = self.config.model, self.config.data
        values = [
            ("layout", model.layout),
            ("hidden-size", model.hidden_size),
            ("num-attention-heads", model.num_attention_heads),
            ("seq-length", model.seq_length),
            ("gelu", model.gelu),
            ("norm-epsilon", model.norm_epsilon),
            ("vocab-size", data.vocab_size),
            ("tokenizer-type", data.tokenizer_type),
        ]
        if data.tokenizer_model is not None:
            values.append(("tokenizer-model", data.tokenizer_model))
        if not model.layout.is_dense:
            values.append(("gate-temperature", model.gate_temperature))
        off = [f"--no-{name}" for name in ("anchor", "gate") if not getattr(model, name)]
        given = [word for name, value in values for word in (f"--{name}", str(value))]
        return shlex.join([*given, *off])


def import_folder(load: str, save: str) -> ImportReport:
    """Write the model in the folder `load` as the first checkpoint, iteration 0, of the run folder `save`.

    Raises `UserError` for a folder of another architecture, weights that are missing, damaged or unsafe to load, a
    run folder that holds a run, and a checkpoint that transformers does not agree with; then none is left.
    """
    source, run = Path(load), Path(save)
    if not source.is_dir():
        raise UserError(f"--load {load}: no such folder: give a Hugging Face model's folder")
    content = read_hf_config(source)
    model_config, vocab_size = from_hf(source, content)
    if (run / layout.LATEST).exists():
        raise UserError(f"--save {save} holds checkpoints of a run: choose another folder")
    config = Config().changed(
        **{name: getattr(model_config, name) for name in vars(model_config)}, vocab_size=vocab_size
    )
    weights = _read(source, model_config, vocab_size)
    try:
        config = _take_tokenizer(source, run, config)
        temporary = layout.begin(run, 0)
        checkpoint = _write(run, temporary, weights, config, model_config, vocab_size)
    except OSError as error:
        shutil.rmtree(layout.temporary_folder(run, 0), ignore_errors=True)
        raise UserError(f"--save {save}: cannot be written ({error.strerror or error})") from None
    try:
        agreement = _verify(source, checkpoint, content)
    except UserError:
        shutil.rmtree(checkpoint)
        (run / layout.LATEST).unlink()
        raise
    return ImportReport(checkpoint, config, agreement)


def _read(source: Path, config: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """Our tensors by canonical name, fp32; every tensor of the folder must have a place."""
    shapes = {name: tuple(tensor.shape) for name, tensor in logical_parameters(_empty(config, vocab_size)).items()}
    theirs = hf_tensors(shapes, dense=config.layout.is_dense)
    weights = {}
    with FolderTensors(source) as tensors:
        found = set(tensors)
        if config.layout.is_dense and "wte.weight" in found:
            # saved from the bare GPT2Model, as OpenAI's are
            theirs = {name: HFTensor(t.name.removeprefix("transformer."), t.transposed) for name, t in theirs.items()}
        for name, shape in shapes.items():
            tensor = theirs[name].convert(tensors.read(theirs[name].name))
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"{source}: {theirs[name].name} has shape {list(tensor.shape)}, {CONFIG} says {list(shape)}"
                )
            weights[name] = tensor
        unused = found - {tensor.name for tensor in theirs.values()}
        if "lm_head.weight" in unused:
            if not torch.equal(tensors.read("lm_head.weight"), weights["embedding.tokens"]):
                raise UserError(f"{source}: lm_head.weight differs from the token embedding: our head is tied to it")
            unused.remove("lm_head.weight")
    # masks that old versions of GPT-2 stored
    unused = {name for name in unused if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if unused:
        raise UserError(f"{source}: {sorted(unused)[0]} has no place in a {config.layout} model of ours")
    return weights


def _empty(config: ModelConfig, vocab_size: int) -> RecurrentTransformer:
    with torch.device("meta"):
        return RecurrentTransformer(config, vocab_size)


def _take_tokenizer(source: Path, run: Path, config: Config) -> Config:
    """Name the folder's tokenizer in the configuration: by type where an export of ours says so, else its files.

    Those are copied beside the checkpoint.
    """
    vocabulary, settings = (source / name for name in _TOKENIZER)
    if settings.is_file():
        try:
            name = json.loads(settings.read_text("utf-8")).get(TRAINED_WITH)
        except (ValueError, AttributeError) as error:
            raise UserError(f"{settings}: broken JSON ({error})") from None
        if name in ("byte", "gpt2"):
            return config.changed(tokenizer_type=name)
    if not vocabulary.is_file():
        return config.changed(tokenizer_type="null")
    run.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, run / name)
    return config.changed(tokenizer_type="huggingface", tokenizer_model=str((run / _TOKENIZER[0]).resolve()))


def _write(
    run: Path, temporary: Path, weights: dict[str, torch.Tensor], config: Config, model: ModelConfig, vocab_size: int
) -> Path:
    index = CheckpointIndex(
        iteration=0,
        consumed_samples=0,
        train_samples=0,
        optimizer_steps=0,
        seed=config.training.seed,
        depths_per_step=1,
        vocab_size=vocab_size,
        model=model_facts(model),
        shapes={name: list(tensor.shape) for name, tensor in weights.items()},
        files={},
    )
    save_tensors(weights, temporary / _WEIGHTS)
    index.files[_WEIGHTS] = layout.file_facts(temporary / _WEIGHTS)
    layout.write_durably(temporary / layout.CONFIG, to_yaml(config))
    layout.write_index(temporary, index)
    return layout.publish(run, 0)


def _verify(source: Path, checkpoint: Path, content: dict[str, Any]) -> Agreement:
    """Compare what main jobs will load with what transformers computes from the folder's weights."""
    model, config, index = load_model(str(checkpoint))
    tokenizer = None if config.data.tokenizer_type == "null" else run_tokenizer(config.data)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in FolderTensors(source).files:
            (folder / path.name).symlink_to(path.resolve())
        for path in source.glob("*.json"):
            if path.name != CONFIG:
                (folder / path.name).symlink_to(path.resolve())
        if not config.model.layout.is_dense:
            content = to_hf(config.model, index.vocab_size, eod=None, dtype="float32")
            copy_code(folder)
        layout.write_durably(folder / CONFIG, json.dumps(content))
        agreement = verify_folder(folder, model, tokenizer, f"the checkpoint made of {source}")
    if agreement.tokenizer_fault is not None:
        raise UserError(f"{source}: its tokenizer cannot be taken over ({agreement.tokenizer_fault})")
    return agreement
