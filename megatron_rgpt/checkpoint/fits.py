"""Does a checkpoint belong to this model? Knows configurations alone, and neither torch nor DeepSpeed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rgpt.checkpoint.layout import CheckpointIndex
from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError

# Fields that change neither the tensors nor what a trained model computes: a resumed run may set them anew.
_FREE = {"hoist_anchor", "eval_noise", "state_noise_std", "gate_noise_std", "gate_bias", "init_method_std"}


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """The model's configuration as `checkpoint.json` keeps it."""
    return {**asdict(config), "layout": str(config.layout)}


def check_fits(folder: Path, index: CheckpointIndex, config: ModelConfig, vocab_size: int) -> None:
    """Raise `UserError` naming what differs if the checkpoint is of another model. R may differ."""
    ours, theirs = model_facts(config), index.model
    for name, value in ours.items():
        if name == "layout":
            layout = Layout.parse(theirs[name])
            same = (layout.prelude, layout.core, layout.coda) == (
                config.layout.prelude,
                config.layout.core,
                config.layout.coda,
            )
        else:
            same = name in _FREE or theirs.get(name) == value
        if not same:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"--load {folder}: the checkpoint has {flag} {theirs.get(name)}, this run has {flag} {value}"
            )
    if index.vocab_size != vocab_size:
        raise UserError(
            f"--load {folder}: the checkpoint has a vocabulary of {index.vocab_size}, this run of {vocab_size}: "
            "use its tokenizer or --vocab-size"
        )
