"""What to say to a flag that Megatron-LM, Megatron-DeepSpeed or GPT-NeoX has and we do not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_OURS = {
    "--activation-checkpoint-method": "--recompute step",
    "--adam-epsilon": "--adam-eps",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-activations": "--recompute step",
    "--deepspeed-activation-checkpointing": "--recompute step",
    "--recompute-activations": "--recompute step",
    "--recompute-granularity": "--recompute step",
    "--recompute-method": "--recompute step",
    "--recompute-num-layers": "--recompute step, which keeps one state per recurrence",
    "--distributed-optimizer": "--zero-stage 1",
    "--use-distributed-optimizer": "--zero-stage 1",
    "--data-impl": "not needed: data is always memory-mapped",
    "--dataloader-type": "not needed: samples are always walked in order of consumed samples",
    "--deepspeed": "not needed: DeepSpeed is always the engine",
    "--distributed-backend": "not needed: NCCL with a GPU, gloo without",
    "--ddp-impl": "not needed: DeepSpeed is always the engine",
    "--use-mcore-models": "not needed: there is one model",
    "--transformer-impl": "not needed: fused kernels are used where they are present",
    "--lr-decay-samples": "--lr-decay-iters",
    "--lr-warmup-samples": "--lr-warmup-iters",
    "--lr-warmup-fraction": "--lr-warmup-iters",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--no-load-rng": "not needed: randomness has no state to load",
    "--no-save-rng": "not needed: randomness has no state to save",
    "--override-opt_param-scheduler": "not needed: the learning rate is a function of the iteration",
    "--override-opt-param-scheduler": "not needed: the learning rate is a function of the iteration",
    "--use-checkpoint-opt-param-scheduler": "not needed: the learning rate is a function of the iteration",
    "--params-dtype": "--precision",
    "--position-embedding-type": "not needed: positions are learned, as in the paper",
    "--wandb-save-dir": "--wandb-project",
    "--use-cpu-initialization": "not needed: weights are always drawn on the CPU, equal for any layout",
    "--use-flash-attn": "not needed: attention goes through scaled_dot_product_attention, which picks flash kernels",
    "--attention-backend": "not needed: attention goes through scaled_dot_product_attention, which picks flash kernels",
    "--test-data": "--test-data-path",
    "--log-throughput": "not needed: throughput is always logged",
    "--log-params-norm": "the gradient norm, which is always logged",
    "--tokenizer-name-or-path": "--tokenizer-model",
}

_UNSUPPORTED = {
    "--fp16": "bf16 has the range that the gate and the loop need without loss scaling; use --bf16",
    "--initial-loss-scale": "bf16 needs no loss scaling",
    "--loss-scale": "bf16 needs no loss scaling",
    "--loss-scale-window": "bf16 needs no loss scaling",
    "--attention-dropout": "the recipe has no dropout",
    "--hidden-dropout": "the recipe has no dropout",
    "--rampup-batch-size": "the batch is constant, so that a position in the run is one number",
    "--ffn-hidden-size": "the MLP is 4 times the hidden size, as in the paper",
    "--kv-channels": "a head has hidden size / heads channels",
    "--group-query-attention": "attention is multi-head, as in the paper",
    "--num-query-groups": "attention is multi-head, as in the paper",
    "--swiglu": "blocks are GPT-2 blocks; see --gelu",
    "--normalization": "blocks use LayerNorm, as in the paper",
    "--disable-bias-linear": "blocks are GPT-2 blocks with biases",
    "--untie-embeddings-and-output-weights": "the head is tied to the embedding, as in the paper",
    "--rotary-base": "positions are learned, as in the paper",
    "--use-rotary-position-embeddings": "positions are learned, as in the paper",
    "--num-experts": "there are no experts in this model",
    "--expert-model-parallel-size": "there are no experts in this model",
    "--optimizer": "the recipe's optimizer is AdamW",
    "--make-vocab-size-divisible-by": "the vocabulary is always padded to a multiple of 128, masked and never saved",
    "--num-layers-per-virtual-pipeline-stage": "the looped pipeline interleaves by itself",
    "--context-parallel-size": "the sequence is sharded by tensor parallelism",
}


def explain_unknown_flag(flag: str, known: Sequence[str]) -> str:
    """One line for a flag that is not ours: our word for it, why there is none, or the nearest known flag."""
    flag = "--" + flag.lstrip("-").replace("_", "-") if flag.startswith("-") else flag
    if ours := _OURS.get(flag):
        return f"{flag} is {ours}" if ours.startswith("not needed") else f"{flag} is not a flag here: use {ours}"
    if reason := _UNSUPPORTED.get(flag):
        return f"{flag} is not supported, because {reason}"
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}: values follow a flag"
    near = difflib.get_close_matches(flag, known, n=1)
    return f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ": see --help")
