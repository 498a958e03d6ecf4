"""DeepSpeed's dictionary follows ours, and a user's file may add to it but not contradict it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rgpt.config import Config, plan_batch
from megatron_rgpt.errors import UserError
from megatron_rgpt.training.deepspeed_config import deepspeed_config

CONFIG = Config().changed(micro_batch_size=2, global_batch_size=16, zero_stage=2, precision="bf16", clip_grad=0.5)


def derived(tmp_path: Path | None = None, theirs: dict | str | None = None) -> dict:
    config = CONFIG
    if theirs is not None:
        path = tmp_path / "ds.json"
        path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
        config = config.changed(deepspeed_config=str(path))
    return deepspeed_config(config, plan_batch(config, 2))


def test_batch_precision_stage_and_clipping_come_from_our_configuration() -> None:
    ours = derived()
    assert (ours["train_batch_size"], ours["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert ours["gradient_accumulation_steps"] == 4
    assert ours["zero_optimization"]["stage"] == 2
    assert ours["bf16"]["enabled"] and ours["data_types"]["grad_accum_dtype"] == "fp32"
    assert ours["gradient_clipping"] == 0.5


def test_other_keys_pass_through_and_auto_takes_our_value(tmp_path: Path) -> None:
    theirs = {
        "train_batch_size": "auto",
        "optimizer": "auto",
        "zero_optimization": {"stage": 2, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}},
        "wall_clock_breakdown": True,
    }
    merged = derived(tmp_path, theirs)
    assert merged["train_batch_size"] == 16 and merged["wall_clock_breakdown"]
    assert merged["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu"},
    }
    assert "optimizer" not in merged


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"train_batch_size": 32}, r"train_batch_size = 32 contradicts --global-batch-size, which gives 16"),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage = 3 contradicts --zero-stage"),
        ({"bf16": {"enabled": False}}, r"bf16.enabled = False contradicts --precision"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled = True contradicts --precision \(fp16 is not supported"),
        ({"gradient_clipping": 1.0}, r"gradient_clipping = 1.0 contradicts --clip-grad"),
        ({"optimizer": {"type": "Adam"}}, r"optimizer is set by --lr"),
        ({"scheduler": {"type": "WarmupLR"}}, r"scheduler is set by --lr-warmup-iters"),
        ("{", r"not valid JSON"),
        ("[]", r"expected a JSON object"),
    ],
)
def test_a_contradiction_names_the_file_the_key_and_our_flag(tmp_path: Path, theirs: dict | str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        derived(tmp_path, theirs)
    assert "ds.json" in str(caught.value)


def test_a_missing_file_is_named() -> None:
    config = CONFIG.changed(deepspeed_config="nowhere.json")
    with pytest.raises(UserError, match=r"--deepspeed_config nowhere.json: cannot be read"):
        deepspeed_config(config, plan_batch(config, 2))
