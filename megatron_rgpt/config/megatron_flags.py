"""What to say to a flag that Megatron-LM, Megatron-DeepSpeed or GPT-NeoX has and we do not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_OURS = {
    "--activation-checkpoint-method": "--recompute step",
    "--adam-epsilon": "--adam-eps",
    "--batch-size": "--micro-batch-size",
    "--blend": "--data-path weight prefix weight prefix",
    "--checkpoint-activations": "--recompute step",
    "--ckpt-step": "--load RUN/iter_0000250",
    "--decoder-num-layers": "--layout",
    "--deepspeed-activation-checkpointing": "--recompute step",
    "--distributed-optimizer": "--zero-stage 1",
    "--encoder-num-layers": "--layout",
    "--encoder-seq-length": "--seq-length",
    "--eval-only": "--skip-train",
    "--lr-decay-samples": "--lr-decay-iters",
    "--lr-warmup-fraction": "--lr-warmup-iters",
    "--lr-warmup-samples": "--lr-warmup-iters",
    "--lr-wsd-decay-samples": "--lr-wsd-decay-iters",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--params-dtype": "--precision",
    "--per-split-data-args-path": "--train-data-path, --valid-data-path and --test-data-path",
    "--pipe-parallel-size": "--pipeline-model-parallel-size",
    "--pretrained-checkpoint": "--load FOLDER --finetune",
    "--recompute-activations": "--recompute step",
    "--recompute-granularity": "--recompute step",
    "--recompute-method": "--recompute step",
    "--recompute-modules": "--recompute step",
    "--recompute-num-layers": "--recompute step, which keeps one state per recurrence",
    "--test-data": "--test-data-path",
    "--tokenizer-name-or-path": "--tokenizer-model",
    "--train-data": "--train-data-path",
    "--use-distributed-optimizer": "--zero-stage 1",
    "--valid-data": "--valid-data-path",
    "--wandb-entity": "--wandb-project",
    "--wandb-name": "--wandb-exp-name",
}

_FUSED = "fused kernels are used where they are present"
_FP32 = "gradients accumulate, and attention, loss and norms are computed, in the precision they need"
_LOGGED = "what is logged is always logged"
_ENGINE = "DeepSpeed is always the engine; its own keys go into --deepspeed_config"
_MEMORY_MAPPED = "data is always memory-mapped, and one thread reads ahead"
_CHECKPOINT = "a checkpoint holds whole tensors by name and loads at any layout"

_NOT_NEEDED = {
    "--accumulate-allreduce-grads-in-fp32": _FP32,
    "--apply-query-key-layer-scaling": _FP32,
    "--attention-backend": "attention goes through scaled_dot_product_attention, which picks flash kernels",
    "--attention-softmax-in-fp32": _FP32,
    "--bias-dropout-fusion": _FUSED,
    "--bias-gelu-fusion": _FUSED,
    "--ckpt-format": _CHECKPOINT,
    "--cross-entropy-loss-fusion": _FUSED,
    "--data-impl": _MEMORY_MAPPED,
    "--dataloader-type": "samples are always walked in order of consumed samples",
    "--ddp-bucket-size": _ENGINE,
    "--ddp-impl": _ENGINE,
    "--deepspeed": _ENGINE,
    "--deepspeed-mpi": "the launcher is recognised by its environment",
    "--dist-ckpt-format": _CHECKPOINT,
    "--distributed-backend": "NCCL with a GPU, gloo without",
    "--distribute-saved-activations": "tensor parallelism shards them by itself",
    "--exit-signal-handler": "SIGTERM and SIGUSR1 make all ranks save and leave",
    "--fp32-residual-connection": _FP32,
    "--gradient-accumulation-fusion": _FUSED,
    "--log-batch-size-to-tensorboard": _LOGGED,
    "--log-learning-rate-to-tensorboard": _LOGGED,
    "--log-memory-to-tensorboard": _LOGGED,
    "--log-params-norm": _LOGGED,
    "--log-progress": _LOGGED,
    "--log-throughput": _LOGGED,
    "--log-timers-to-tensorboard": _LOGGED,
    "--log-validation-ppl-to-tensorboard": _LOGGED,
    "--masked-softmax-fusion": _FUSED,
    "--mmap-bin-files": _MEMORY_MAPPED,
    "--no-bias-dropout-fusion": _FUSED,
    "--no-bias-gelu-fusion": _FUSED,
    "--no-gradient-accumulation-fusion": _FUSED,
    "--no-load-rng": "randomness has no state to load",
    "--no-masked-softmax-fusion": _FUSED,
    "--no-mmap-bin-files": _MEMORY_MAPPED,
    "--no-persist-layer-norm": _FUSED,
    "--no-save-rng": "randomness has no state to save",
    "--num-workers": _MEMORY_MAPPED,
    "--overlap-grad-reduce": _ENGINE,
    "--overlap-p2p-communication": "pipeline transfers never block a stage's sends",
    "--overlap-param-gather": _ENGINE,
    "--override-opt-param-scheduler": "the learning rate is a function of the iteration",
    "--position-embedding-type": "positions are learned, as in the paper",
    "--tp-comm-overlap": "the sequence-parallel collectives are those of NCCL",
    "--transformer-impl": _FUSED,
    "--use-checkpoint-args": "the resolved configuration lies in the run's folder: --config RUN/config.yaml",
    "--use-checkpoint-opt-param-scheduler": "the learning rate is a function of the iteration",
    "--use-cpu-initialization": "weights are always drawn on the CPU, equal for any layout",
    "--use-dist-ckpt": _CHECKPOINT,
    "--use-flash-attn": "attention goes through scaled_dot_product_attention, which picks flash kernels",
    "--use-legacy-models": "there is one model",
    "--use-mcore-models": "there is one model",
    "--vocab-padding": "the vocabulary is always padded, masked and never saved",
}

_NO_LOSS_SCALE = "bf16 needs no loss scaling"
_NO_DROPOUT = "the recipe has no dropout"
_GPT2_BLOCK = "blocks are GPT-2 blocks, as in the paper; see --gelu"
_LEARNED = "positions are learned, as in the paper"
_NO_EXPERTS = "there are no experts in this model"
_MULTI_HEAD = "attention is multi-head, as in the paper"

_UNSUPPORTED = {
    "--attention-dropout": _NO_DROPOUT,
    "--context-parallel-size": "the sequence is sharded by tensor parallelism",
    "--disable-bias-linear": _GPT2_BLOCK,
    "--expert-model-parallel-size": _NO_EXPERTS,
    "--ffn-hidden-size": "the MLP is 4 times the hidden size, as in the paper",
    "--fp16": "bf16 has the range that the gate and the loop need without loss scaling; use --bf16",
    "--fp8-format": "the recipe is bf16",
    "--group-query-attention": _MULTI_HEAD,
    "--hidden-dropout": _NO_DROPOUT,
    "--hysteresis": _NO_LOSS_SCALE,
    "--initial-loss-scale": _NO_LOSS_SCALE,
    "--init-method-xavier-uniform": "weights start normal, --init-method-std",
    "--iter-per-epoch": "training is counted in iterations",
    "--kv-channels": "a head has hidden size / heads channels",
    "--loss-scale": _NO_LOSS_SCALE,
    "--loss-scale-window": _NO_LOSS_SCALE,
    "--make-vocab-size-divisible-by": "the vocabulary is always padded to a multiple of 128, masked and never saved",
    "--manual-gc": "garbage collection is left to Python",
    "--min-loss-scale": _NO_LOSS_SCALE,
    "--mock-data": "tools/preprocess_data.py makes a real pair from any folder in seconds",
    "--moe-router-topk": _NO_EXPERTS,
    "--multi-latent-attention": _MULTI_HEAD,
    "--normalization": "blocks use LayerNorm, as in the paper",
    "--num-experts": _NO_EXPERTS,
    "--num-layers-per-virtual-pipeline-stage": "the looped pipeline interleaves by itself",
    "--num-layers-per-virtual-stage": "the looped pipeline interleaves by itself",
    "--num-query-groups": _MULTI_HEAD,
    "--optimizer": "the recipe's optimizer is AdamW",
    "--profile": "use torch's or NVIDIA's profiler around the command",
    "--qk-layernorm": _GPT2_BLOCK,
    "--rampup-batch-size": "the batch is constant, so that a position in the run is one number",
    "--reset-attention-mask": "attention crosses documents, as in the paper",
    "--rotary-base": _LEARNED,
    "--rotary-percent": _LEARNED,
    "--squared-relu": _GPT2_BLOCK,
    "--start-weight-decay": "weight decay is constant, as in the paper",
    "--end-weight-decay": "weight decay is constant, as in the paper",
    "--swiglu": _GPT2_BLOCK,
    "--untie-embeddings-and-output-weights": "the head is tied to the embedding, as in the paper",
    "--use-rotary-position-embeddings": _LEARNED,
    "--weight-decay-incr-style": "weight decay is constant, as in the paper",
}


def explain_unknown_flag(flag: str, known: Sequence[str]) -> str:
    """One line for a flag that is not ours: our word for it, why there is none, or the nearest known flag."""
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}: values follow a flag"
    dashed = "--" + flag.lstrip("-").replace("_", "-")
    looked_up = dashed.lower()
    if ours := _OURS.get(looked_up):
        return f"{dashed} is not a flag here: use {ours}"
    if reason := _NOT_NEEDED.get(looked_up):
        return f"{dashed} is not needed: {reason}; leave it out"
    if reason := _UNSUPPORTED.get(looked_up):
        return f"{dashed} is not supported, because {reason}"
    near = difflib.get_close_matches(dashed, known, n=1, cutoff=0.75)
    return f"unknown flag {dashed}" + (f": did you mean {near[0]}?" if near else ": see --help")
