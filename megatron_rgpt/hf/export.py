"""A checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads, with no install of ours.

A recurrent model carries its code (`*_recurrent_gpt.py`); a dense one is a stock `GPT2LMHeadModel`. The folder gets
its name only after a clean process has loaded it and given our logits at every exit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rgpt.checkpoint.layout import CheckpointIndex, find_checkpoint, read_index, sync, verify_file
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.config import Config
from megatron_rgpt.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_rgpt.errors import UserError
from megatron_rgpt.hf.hf_config import CONFIG, to_hf
from megatron_rgpt.hf.model_card import model_card
from megatron_rgpt.hf.names import hf_tensors, logical_parameters
from megatron_rgpt.hf.shards import write_shards
from megatron_rgpt.hf.tokenizer_files import run_tokenizer, write_tokenizer
from megatron_rgpt.hf.verify import Agreement, verify_folder
from megatron_rgpt.model.recurrent import RecurrentTransformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written."""

    dtype: str = "fp32"
    shard_bytes: int = 5 * 10**9
    kv_sharing: str = "full"
    """The exported model's default KV strategy."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how closely a clean process agrees."""

    folder: Path
    architecture: str
    agreement: Agreement
    tokenizer: str | None
    """Why there is no tokenizer in the folder; None: there is."""


def export(load: str, output: str, options: ExportOptions) -> ExportReport:
    """Export the checkpoint that `load` names into the new folder `output`.

    Raises `UserError` for a checkpoint that is not one or damaged, a folder that exists or cannot be written, and
    an export that does not give our logits; then no folder is left.
    """
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output {output} exists: choose a new folder")
    checkpoint = find_checkpoint(load)
    if checkpoint is None:
        raise UserError(f"--load {load}: no checkpoint there (no `latest`, no checkpoint.json): check the folder")
    index = read_index(checkpoint)
    for name, facts in index.files.items():
        verify_file(checkpoint, name, facts)
    model, config, index = load_model(str(checkpoint))
    with torch.no_grad():
        for parameter in model.parameters():
            # what the folder will hold: the check then compares models, not roundings
            parameter.copy_(parameter.to(DTYPES[options.dtype]))
    temporary = target.with_name(target.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        report = _fill(temporary, checkpoint, model, config, index, options)
        sync(temporary)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"--output {output}: cannot be written ({error.strerror or error})") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ExportReport(target, *report)


def _fill(
    folder: Path,
    checkpoint: Path,
    model: RecurrentTransformer,
    config: Config,
    index: CheckpointIndex,
    options: ExportOptions,
) -> tuple[str, Agreement, str | None]:
    """Write all files, then have them checked."""
    dense = config.model.layout.is_dense
    _write_weights(folder, model, options)
    tokenizer = run_tokenizer(config.data)
    has_tokenizer = write_tokenizer(tokenizer, folder, config.model.seq_length)
    eod = tokenizer.eod if tokenizer.eod is not None and tokenizer.eod < index.vocab_size else None
    content = to_hf(config.model, index.vocab_size, eod=eod, dtype=_NAMES[options.dtype], kv_sharing=options.kv_sharing)
    _write_json(folder / CONFIG, content)
    ids = {name: eod for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    if not dense:
        copy_code(folder)
    (folder / "README.md").write_text(model_card(config, index, checkpoint))
    agreement = verify_folder(folder, model, tokenizer if has_tokenizer else None, "the exported folder")
    if agreement.tokenizer_fault is None:
        return content["architectures"][0], agreement, None if has_tokenizer else "the run's ids stand for no text"
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise UserError(f"the exported folder: its tokenizer is not the run's ({agreement.tokenizer_fault})")
    # transformers knows some families of these models and not their general rules: the model file alone is left
    (folder / "tokenizer_config.json").unlink()
    why = f"transformers cannot use tokenizer.model ({agreement.tokenizer_fault}): encode with sentencepiece"
    return content["architectures"][0], agreement, why


def _write_weights(folder: Path, model: RecurrentTransformer, options: ExportOptions) -> None:
    ours, dtype = logical_parameters(model), DTYPES[options.dtype]
    theirs = hf_tensors(ours, dense=model.config.layout.is_dense)

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in ours.items():
            # a copy: the tensors of a file may not share memory
            yield theirs[name].name, theirs[name].convert(tensor.to(dtype, copy=True))

    width = torch.empty((), dtype=dtype).element_size()
    sizes = {theirs[name].name: tensor.numel() * width for name, tensor in ours.items()}
    write_shards(folder, converted(), sizes, options.shard_bytes)


def copy_code(folder: Path) -> None:
    """Put the code of the exported model into its folder."""
    for path in sorted(Path(__file__).parent.glob("*_recurrent_gpt.py")):
        shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
