"""The configuration: one frozen dataclass per concern, and every check on values that needs no other machine.

A field is a flag and a YAML key of the same name (`hidden_size`: `--hidden-size`, `hidden-size: 768`), so names
are unique over all sections. `flags.py` reads and writes them; nothing else parses options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megatron_rgpt.config.layout import Layout
from megatron_rgpt.errors import UserError


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field with its help text; `alias` names a second flag for it, `presets` flags that stand for one value."""
    return field(default=default, metadata={"help": help, **metadata})


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class ModelConfig:
    """The model: what is trained, whatever the machines."""

    layout: Layout = option(
        Layout(1, 1, 10, 1),
        "prelude+core x R+coda, as in 2+5x4+2, or L for a dense model",
        alias="--num-layers",
    )
    hidden_size: int = option(768, "width d of the residual stream")
    num_attention_heads: int = option(12, "attention heads; must divide the hidden size")
    seq_length: int = option(1024, "tokens per sample, S", alias="--max-position-embeddings")
    gelu: Literal["exact", "tanh"] = option("exact", "exact as in nanoGPT, or tanh as in OpenAI's GPT-2")
    init_method_std: float = option(0.02, "standard deviation of initial weights")
    norm_epsilon: float = option(1e-5, "epsilon of LayerNorm", alias="--layernorm-epsilon")
    anchor: bool = option(True, "re-inject the prelude's output at every step (W_proj of Eq. 2)")
    gate: bool = option(True, "blend state and proposal by the learned gate (Eq. 4-5); off: h <- proposal")
    gate_bias: float = option(4.0, "initial bias of the gate's second layer; +4 opens it to 0.98 copy")
    gate_temperature: float = option(1.0, "tau of Eq. 5")
    state_noise_std: float = option(0.1, "sigma_x: noise on the state at the core's input, at every step")
    gate_noise_std: float = option(0.1, "sigma_g: noise on the gate's logit, in training")
    eval_noise: bool = option(False, "keep both noises at evaluation")
    hoist_anchor: bool = option(True, "compute the anchor's terms once per forward instead of at every step")

    def __post_init__(self) -> None:
        require(self.hidden_size > 0, f"--hidden-size {self.hidden_size}: must be positive")
        require(
            self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads == 0,
            f"--num-attention-heads {self.num_attention_heads} does not divide --hidden-size {self.hidden_size}: "
            "choose a divisor",
        )
        require(self.seq_length > 0, f"--seq-length {self.seq_length}: must be positive")
        require(self.init_method_std > 0, f"--init-method-std {self.init_method_std}: must be positive")
        require(self.norm_epsilon > 0, f"--norm-epsilon {self.norm_epsilon}: must be positive")
        require(math.isfinite(self.gate_bias), f"--gate-bias {self.gate_bias}: must be a finite number")
        require(self.gate_temperature > 0, f"--gate-temperature {self.gate_temperature}: must be positive")
        require(self.state_noise_std >= 0, f"--state-noise-std {self.state_noise_std}: must not be negative")
        require(self.gate_noise_std >= 0, f"--gate-noise-std {self.gate_noise_std}: must not be negative")


@dataclass(frozen=True)
class DepthConfig:
    """How many recurrences a training sample gets (paper §3.4)."""

    depth_sampling: Literal["uniform", "stratified", "fixed"] = option(
        "uniform",
        "uniform: each group draws r ~ U{r_min..R}; stratified: a step deals the values as equally as it can; "
        "fixed: always R",
    )
    min_recurrences: int = option(1, "r_min, the smallest depth that is drawn")
    depths_per_step: int | None = option(
        None,
        "D: groups of consecutive samples of the global batch that share a depth (default: the micro-steps)",
    )

    def __post_init__(self) -> None:
        require(self.min_recurrences >= 0, f"--min-recurrences {self.min_recurrences}: must not be negative")
        require(
            self.depths_per_step is None or self.depths_per_step > 0,
            f"--depths-per-step {self.depths_per_step}: must be positive",
        )


@dataclass(frozen=True)
class DataConfig:
    """Indexed datasets and the tokenizer they were made with."""

    data_path: tuple[str, ...] = option((), "prefix of a .bin/.idx pair, or weight prefix weight prefix ...")
    train_data_path: tuple[str, ...] = option((), "as --data-path, for training alone")
    valid_data_path: tuple[str, ...] = option((), "as --data-path, for validation alone")
    test_data_path: tuple[str, ...] = option((), "as --data-path, for testing alone")
    split: str = option("969,30,1", "shares of --data-path for training, validation, test")
    data_cache_path: str | None = option(None, "folder for sample indexes (default: beside the data)")
    data_index_timeout_minutes: float = option(10.0, "how long ranks wait for another one to build an index")
    tokenizer_type: str = option("byte", "byte, gpt2, or another tokenizer's name")
    vocab_file: str | None = option(None, "vocabulary file of the tokenizer")
    merge_file: str | None = option(None, "merges file of a BPE tokenizer")
    tokenizer_model: str | None = option(None, "model file of the tokenizer")
    vocab_size: int | None = option(None, "vocabulary size (default: the tokenizer's)")
    reset_position_ids: bool = option(False, "restart positions after each end of document; attention crosses it")
    eod_mask_loss: bool = option(False, "count no loss at the end-of-document token")

    def __post_init__(self) -> None:
        require(
            self.vocab_size is None or self.vocab_size > 0,
            f"--vocab-size {self.vocab_size}: must be positive",
        )
        per_split = self.train_data_path or self.valid_data_path or self.test_data_path
        require(
            not (self.data_path and per_split),
            "--data-path and --train-data-path/--valid-data-path/--test-data-path exclude each other: give one kind",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate (paper §4.1)."""

    lr: float = option(6e-4, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    lr_warmup_iters: int = option(0, "iterations of linear warm-up")
    lr_decay_style: Literal["cosine", "linear", "constant", "WSD"] = option("cosine", "shape after the warm-up")
    lr_decay_iters: int | None = option(None, "iteration at which the decay ends (default: --train-iters)")
    lr_wsd_decay_iters: int | None = option(None, "length of the final decay of WSD (default: a tenth of the run)")
    weight_decay: float = option(0.1, "decay of matrices; biases and LayerNorms have none")
    clip_grad: float = option(1.0, "largest gradient norm, 0 for no clipping")
    adam_beta1: float = option(0.9, "AdamW's beta 1")
    adam_beta2: float = option(0.95, "AdamW's beta 2")
    adam_eps: float = option(1e-8, "AdamW's epsilon")

    def __post_init__(self) -> None:
        require(self.lr > 0, f"--lr {self.lr}: must be positive")
        require(0 <= self.min_lr <= self.lr, f"--min-lr {self.min_lr}: must lie between 0 and --lr {self.lr}")
        require(self.lr_warmup_iters >= 0, f"--lr-warmup-iters {self.lr_warmup_iters}: must not be negative")
        for name, value in (
            ("lr-decay-iters", self.lr_decay_iters),
            ("lr-wsd-decay-iters", self.lr_wsd_decay_iters),
        ):
            require(value is None or value > 0, f"--{name} {value}: must be positive")
        require(
            self.lr_decay_iters is None or self.lr_decay_iters > self.lr_warmup_iters,
            f"--lr-decay-iters {self.lr_decay_iters} ends before --lr-warmup-iters {self.lr_warmup_iters} does",
        )
        require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay}: must not be negative")
        require(self.clip_grad >= 0, f"--clip-grad {self.clip_grad}: must not be negative (0 turns clipping off)")
        for name, value in (("adam-beta1", self.adam_beta1), ("adam-beta2", self.adam_beta2)):
            require(0 <= value < 1, f"--{name} {value}: must be in [0, 1)")
        require(self.adam_eps > 0, f"--adam-eps {self.adam_eps}: must be positive")


@dataclass(frozen=True)
class TrainingConfig:
    """The length of the run, the batch, and numerics."""

    micro_batch_size: int = option(1, "samples per rank and micro-step")
    global_batch_size: int | None = option(None, "samples per iteration (default: one micro-step on every rank)")
    train_iters: int | None = option(None, "iterations of the whole run")
    train_samples: int | None = option(None, "samples of the whole run, instead of --train-iters")
    seed: int = option(1337, "seed of weights, depths, noise and data order")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = option(
        "auto",
        "bf16 (fp32 accumulation), fp32, or fp64 for parity checks; auto: bf16 on a GPU, fp32 elsewhere",
        presets={"--bf16": "bf16", "--fp32": "fp32"},
    )
    recompute: Literal["none", "step"] = option(
        "none",
        "step: keep only h^(k) and recompute each recurrence, and each block outside it, in the backward pass",
    )
    skip_train: bool = option(False, "evaluate only")
    exit_interval: int | None = option(None, "save and leave after the first iteration divisible by this")
    exit_duration_in_mins: float | None = option(None, "save and leave after this many minutes")

    def __post_init__(self) -> None:
        for name in (
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "exit_interval",
        ):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name.replace('_', '-')} {value}: must be positive")
        require(
            self.exit_duration_in_mins is None or self.exit_duration_in_mins > 0,
            f"--exit-duration-in-mins {self.exit_duration_in_mins}: must be positive",
        )
        require(
            self.train_iters is None or self.train_samples is None,
            f"--train-iters {self.train_iters} and --train-samples {self.train_samples}: give one of the two",
        )
        require(0 <= self.seed < 2**32, f"--seed {self.seed}: must lie in [0, 2^32)")


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread over ranks."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer's weights, heads and the sequence")
    pipeline_model_parallel_size: int = option(
        1, "stages that share the core's blocks; micro-batches travel them in a ring"
    )
    pipeline_placement: str | None = option(
        None, "blocks per stage by hand, as in 'core=3,5,6,6 coda=2,0,0,0' (default: searched by simulation)"
    )
    sequence_parallel: bool = option(True, "tensor parallelism always shards the residual stream along the sequence")
    zero_stage: int = option(1, "DeepSpeed ZeRO stage, 0 to 3")
    deepspeed_config: str | None = option(
        None, 'further DeepSpeed JSON, merged in; "auto" values are filled, contradictions are errors'
    )
    distributed_timeout_minutes: float = option(10.0, "how long a collective may wait for a rank")

    def __post_init__(self) -> None:
        tp = self.tensor_model_parallel_size
        require(tp > 0, f"--tensor-model-parallel-size {tp}: must be positive")
        pp = self.pipeline_model_parallel_size
        require(pp > 0, f"--pipeline-model-parallel-size {pp}: must be positive")
        require(
            pp == 1 or self.zero_stage <= 1,
            f"--zero-stage {self.zero_stage} with --pipeline-model-parallel-size {pp}: a pipeline accumulates "
            "gradients over a whole step, so use --zero-stage 0 or 1",
        )
        require(
            pp > 1 or self.pipeline_placement is None,
            "--pipeline-placement needs --pipeline-model-parallel-size of 2 or more",
        )
        require(
            self.sequence_parallel or tp == 1,
            "--no-sequence-parallel: tensor parallelism is always sequence-parallel here (the same bytes travel, and "
            "activations are sharded): leave it out",
        )
        require(self.zero_stage in (0, 1, 2, 3), f"--zero-stage {self.zero_stage}: must be 0, 1, 2 or 3")
        require(
            self.distributed_timeout_minutes > 0,
            f"--distributed-timeout-minutes {self.distributed_timeout_minutes}: must be positive",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation during and after training."""

    eval_interval: int = option(1000, "iterations between evaluations, 0 for none during training")
    eval_iters: int = option(100, "global batches per evaluation, 0 for no evaluation at all")
    eval_exits: Literal["all", "final"] = option("final", "all: the loss at every exit k = 0..R; final: at R alone")

    def __post_init__(self) -> None:
        require(self.eval_interval >= 0, f"--eval-interval {self.eval_interval}: must not be negative")
        require(self.eval_iters >= 0, f"--eval-iters {self.eval_iters}: must not be negative")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where a run is saved and what it starts from."""

    save: str | None = option(None, "folder of the run: checkpoints, configuration, metrics.jsonl")
    save_interval: int | None = option(None, "iterations between checkpoints (the last one is always saved)")
    save_total_limit: int | None = option(None, "whole checkpoints to keep; older ones are removed after each save")
    load: str | None = option(None, "folder of the run to go on from, or of one checkpoint")
    finetune: bool = option(False, "load weights alone and start at iteration 0")
    load_optim: bool = option(True, "load the optimizer's state (off: start with fresh moments)")

    def __post_init__(self) -> None:
        require(
            self.save_interval is None or self.save_interval > 0,
            f"--save-interval {self.save_interval}: must be positive",
        )
        require(
            self.save_total_limit is None or self.save_total_limit > 0,
            f"--save-total-limit {self.save_total_limit}: must be positive: the newest checkpoint is always kept",
        )
        require(not self.finetune or self.load is not None, "--finetune needs --load FOLDER")


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported, and where."""

    log_interval: int = option(10, "iterations between log lines")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard scalars")
    wandb_project: str | None = option(None, "Weights & Biases project")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")

    def __post_init__(self) -> None:
        require(self.log_interval > 0, f"--log-interval {self.log_interval}: must be positive")


@dataclass(frozen=True)
class Config:
    """The whole configuration; the single source of truth of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        layout, tp = self.model.layout, self.parallel.tensor_model_parallel_size
        for flag, size in (
            ("num-attention-heads", self.model.num_attention_heads),
            ("seq-length", self.model.seq_length),
        ):
            require(
                size % tp == 0, f"--tensor-model-parallel-size {tp} does not divide --{flag} {size}: choose a divisor"
            )
        require(
            layout.is_dense or self.depth.min_recurrences <= layout.recurrences,
            f"--min-recurrences {self.depth.min_recurrences} is above R = {layout.recurrences} of --layout {layout}",
        )
        require(
            self.training.precision not in ("bf16", "fp64") or self.parallel.zero_stage >= 1,
            f"--precision {self.training.precision} needs --zero-stage 1 or more: DeepSpeed's stage 0 is for fp32",
        )
        require(
            self.training.precision != "fp64" or self.checkpoint.save is None,
            "--precision fp64 is for parity checks and cannot be saved: leave --save out",
        )

    def changed(self, **values: Any) -> Config:
        """A copy with the named fields, of whatever section, set anew."""
        for section in fields(self):
            own = {k: v for k, v in values.items() if k in {f.name for f in fields(getattr(self, section.name))}}
            if own:
                self = replace(self, **{section.name: replace(getattr(self, section.name), **own)})
                values = {k: v for k, v in values.items() if k not in own}
        assert not values, f"no such fields: {sorted(values)}"
        return self
