"""Flags and YAML: what they accept, what they say, and that the resolved configuration reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rgpt.config import Config, Layout, plan_batch
from megatron_rgpt.config.flags import config_fields, parse_invocation, to_yaml
from megatron_rgpt.errors import UserError


def parse(text: str) -> Config:
    return parse_invocation(text.split()).config


def test_flags_go_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("layout: 2+5x4+2\nhidden_size: 64\nlr: 1e-3\nsplit: 90,10,0\ndata-path: [0.7, A, 0.3, B]\n")
    config = parse(f"--config {file} --hidden-size 128 --num-attention-heads 4")
    assert config.model.layout == Layout(2, 5, 4, 2)
    assert config.model.hidden_size == 128
    assert config.optimizer.lr == 1e-3
    assert config.data.data_path == ("0.7", "A", "0.3", "B")
    assert config.data.split == "90,10,0"
    assert config.optimizer.adam_beta2 == 0.95


def test_a_flag_wins_over_what_excludes_it_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train-iters: 500\ndata-path: [a]\nbf16: true\nno-gate: true\n")
    config = parse(f"--config {file} --train-samples 1600 --train-data-path b")
    assert (config.training.train_iters, config.training.train_samples) == (None, 1600)
    assert (config.data.data_path, config.data.train_data_path) == ((), ("b",))
    assert config.training.precision == "bf16" and not config.model.gate


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse("--layout 1+5x6+5 --bf16 --no-gate --data-path 1 a 2 b --lr 3e-5 --load x --no-load-optim")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(f"--config {tmp_path / 'config.yaml'}") == config


def test_every_field_has_help_and_a_name_of_its_own() -> None:
    names = [field.name for field in config_fields()]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"] for field in config_fields())


MEGATRON_FLAGS = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-style cosine "
    "--lr-decay-iters 10 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std 0.02 --bf16 --seed 7 --data-path p --split 969,30,1 --data-cache-path c --tokenizer-type gpt2 "
    "--vocab-size 50257 --eval-interval 5 --eval-iters 1 --log-interval 1 --save s --save-interval 5 --load s "
    "--finetune --no-load-optim --skip-train --tensorboard-dir t --wandb-project w --exit-interval 5 "
    "--exit-duration-in-mins 10 --distributed-timeout-minutes 5 --zero-stage 1 --deepspeed_config d.json --num-layers 4"
)


def test_the_flags_of_a_megatron_script_are_taken_as_they_are() -> None:
    config = parse(MEGATRON_FLAGS)
    assert config.model.layout == Layout(4)
    assert config.training.precision == "bf16"
    assert config.parallel.deepspeed_config == "d.json"
    assert not config.checkpoint.load_optim and config.checkpoint.finetune and config.training.skip_train


def test_underscores_and_dashes_are_the_same() -> None:
    assert parse("--hidden_size 48 --num_attention_heads=3 --local_rank=1").model.hidden_size == 48


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-sized 3", r"unknown flag --hidden-sized: did you mean --hidden-size\?"),
        ("--fp16", r"--fp16 is not supported, because"),
        ("--swiglu", r"--swiglu is not supported, because"),
        ("--use-flash-attn", r"--use-flash-attn is not needed"),
        ("--recompute-activations", r"--recompute-activations is not a flag here: use --recompute step"),
        ("--num-workers 2", r"--num-workers is not needed: data is always memory-mapped"),
        ("--DDP-impl local", r"--DDP-impl is not needed: DeepSpeed is always the engine"),
        ("--use_checkpoint_args", r"--use-checkpoint-args is not needed: the resolved configuration"),
        ("--ckpt-step 5", r"--ckpt-step is not a flag here: use --load RUN/iter_0000250"),
        ("--mock-data", r"--mock-data is not supported, because tools/preprocess_data.py"),
        ("--zzz", r"unknown flag --zzz: see --help"),
        ("--hidden-size x", r"--hidden-size: 'x': expected a whole number"),
        ("--lr fast", r"--lr: 'fast': expected a number"),
        ("--gelu relu", r"--gelu: 'relu': choose from exact, tanh"),
        ("--seed", r"--seed: expected one argument"),
        ("stray", r"unexpected argument 'stray'"),
        ("--layout 2+5", r"--layout: '2\+5' does not parse"),
        ("--layout 1+0x3+1", r"the core and R must be at least 1"),
        ("--layout 0", r"--layout: '0' does not parse"),
        ("--num-layers 3 --layout 4", r"--num-layers 3 and --layout 4 contradict each other"),
        ("--bf16 --precision fp32", r"--precision fp32 .*contradict each other"),
        ("--num-attention-heads 7", r"--num-attention-heads 7 does not divide --hidden-size 768"),
        ("--train-iters 3 --train-samples 3", r"--train-iters 3 and --train-samples 3: give one of the two"),
        ("--min-recurrences 11", r"--min-recurrences 11 is above R = 10"),
        ("--bf16 --zero-stage 0", r"--precision bf16 needs --zero-stage 1 or more"),
        ("--zero-stage 4", r"--zero-stage 4: must be 0, 1, 2 or 3"),
        ("--micro-batch-size 0", r"--micro-batch-size 0: must be positive"),
        ("--min-lr 1", r"--min-lr 1.0: must lie between 0 and --lr"),
        ("--lr-warmup-iters 5 --lr-decay-iters 5", r"--lr-decay-iters 5 ends before --lr-warmup-iters 5"),
        ("--finetune", r"--finetune needs --load"),
        ("--data-path a --train-data-path b", r"exclude each other"),
        ("--config nowhere.yaml", r"--config nowhere.yaml: cannot be read"),
        ("--json", r"--json and --world-size are for --dry-run"),
    ],
)
def test_a_wrong_flag_is_answered_with_one_line_that_names_it(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("hidden-sized: 3", r"unknown flag --hidden-sized: did you mean --hidden-size\?"),
        ("hidden-size: wide", r"hidden-size: 'wide': .*expected a whole number"),
        ("hidden-size: [1]", r"hidden-size: \[1\]: expected N"),
        ("gate: 3", r"gate: 3: expected true or false"),
        ("lr: null", r"lr: None: needs a value"),
        ("layout: 3\nnum-layers: 4", r"sets layout a second time"),
        ("- a", r"expected lines of `key: value`, found a list"),
        ("a: b: c", r"not valid YAML"),
        ("fp16: true", r"--fp16 is not supported, because"),
    ],
)
def test_a_wrong_yaml_file_is_answered_with_its_name_and_key(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml)
    with pytest.raises(UserError, match=message) as caught:
        parse(f"--config {file}")
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("text", "layout"), [("12", Layout(12)), ("0+1x12+0", Layout(0, 1, 12, 0))])
def test_layouts_read_back_from_their_text(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout and str(layout) == text


def test_a_layout_may_be_written_with_the_multiplication_sign() -> None:
    assert Layout.parse("2 + 5 × 4 + 2") == Layout(2, 5, 4, 2)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"global_batch_size": 12, "micro_batch_size": 4}, 2, r"--global-batch-size 12 is not divisible by .* = 8"),
        ({"global_batch_size": 16, "depths_per_step": 3}, 1, r"--depths-per-step 3: a group of 16/3 samples"),
        ({"global_batch_size": 16, "depths_per_step": 8, "micro_batch_size": 2}, 2, r"--depths-per-step 8: .* = 4"),
        ({"global_batch_size": 16, "train_samples": 15}, 1, r"--train-samples 15 is less than one"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_their_numbers(changes: dict, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_batch(Config().changed(**changes), ranks)
