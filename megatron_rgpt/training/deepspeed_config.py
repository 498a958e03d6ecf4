"""The DeepSpeed dictionary, derived from our configuration; a user's JSON is merged into it.

Ours is the one source of truth: `"auto"` in the user's file takes our value, a key we set must agree with it, and
every other key passes through to DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rgpt.config import BatchPlan, Config
from megatron_rgpt.errors import UserError

_FLAG_OF = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size / (--micro-batch-size x data-parallel ranks)",
    "gradient_clipping": "--clip-grad",
    "bf16.enabled": "--precision",
    "fp16.enabled": "--precision (fp16 is not supported; use bf16)",
    "data_types.grad_accum_dtype": "--precision (gradients accumulate in fp32)",
    "zero_optimization.stage": "--zero-stage",
}
_OURS_ALONE = {
    "optimizer": "--lr, --weight-decay and --adam-*",
    "scheduler": "--lr-warmup-iters and --lr-decay-*",
}


def deepspeed_config(config: Config, batch: BatchPlan) -> dict[str, Any]:
    """What `deepspeed.initialize` gets. Raises `UserError` for a user's JSON that is unreadable or contradicts us."""
    bf16 = config.training.precision == "bf16"
    # a pipeline's gradients come from all micro-batches of a step at once
    micro_steps = 1 if config.parallel.pipeline_model_parallel_size > 1 else batch.micro_steps
    ours: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size * batch.micro_steps // micro_steps,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": config.parallel.zero_stage},
        "bf16": {"enabled": bf16},
        "fp16": {"enabled": False},
        # the optimizer is torch's fused AdamW, also with offloading: DeepSpeed's own is compiled at first use
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if bf16:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if path := config.parallel.deepspeed_config:
        _merge(ours, _read(path), path)
    return ours


def _read(path: str) -> dict[str, Any]:
    try:
        theirs = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--deepspeed_config {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--deepspeed_config {path}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"--deepspeed_config {path}: not valid JSON: {error}") from None
    if not isinstance(theirs, dict):
        raise UserError(f"--deepspeed_config {path}: expected a JSON object, found {type(theirs).__name__}")
    for section, flags in _OURS_ALONE.items():
        if theirs.get(section, "auto") != "auto":
            raise UserError(f"--deepspeed_config {path}: {section} is set by {flags}: remove it from the file")
        theirs.pop(section, None)
    return theirs


def _merge(ours: dict[str, Any], theirs: dict[str, Any], path: str, prefix: str = "") -> None:
    for key, value in theirs.items():
        name = prefix + key
        if value == "auto":
            continue
        if isinstance(value, dict) and isinstance(ours.get(key, {}), dict):
            _merge(ours.setdefault(key, {}), value, path, name + ".")
        elif ours.get(key) in (None, value):
            ours[key] = value
        else:
            flag = _FLAG_OF.get(name, "our configuration")
            raise UserError(
                f"--deepspeed_config {path}: {name} = {value!r} contradicts {flag}, which gives {ours[key]!r}: "
                'set it to "auto" or remove it'
            )
