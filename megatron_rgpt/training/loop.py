"""The training loop: iterations over a global batch each, evaluations, checkpoints, logs. Reads top to bottom."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rgpt.checkpoint.fits import model_facts
from megatron_rgpt.checkpoint.layout import CONFIG, CheckpointIndex, write_durably
from megatron_rgpt.checkpoint.load import load_optimizer, verify_checkpoint
from megatron_rgpt.checkpoint.read import load_weights, open_checkpoint
from megatron_rgpt.checkpoint.save import save_checkpoint
from megatron_rgpt.checkpoint.tensors import EngineTensors
from megatron_rgpt.config.flags import to_yaml
from megatron_rgpt.data.datasets import summary_lines
from megatron_rgpt.data.sampler import batches
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.counts import executed_flops_per_token
from megatron_rgpt.parallel.agreement import on_first_rank
from megatron_rgpt.parallel.mesh import Mesh
from megatron_rgpt.parallel.notice import Notice
from megatron_rgpt.training.clock import Clock, peak_memory_gib
from megatron_rgpt.training.depth import micro_step_depths
from megatron_rgpt.training.engine import Engine, build_engine
from megatron_rgpt.training.evaluation import evaluate, exits_to_evaluate
from megatron_rgpt.training.feed import balance, micro_batches
from megatron_rgpt.training.learning_rate import learning_rate
from megatron_rgpt.training.prepare import PreparedRun, run_past
from megatron_rgpt.training.run_log import IterationReport, RunLog


def train(run: PreparedRun, headline: str, notice: Notice) -> None:
    """Train from where `run` starts to its end, or until any rank's `notice` asks to leave. Every rank calls this."""
    config, batch = run.config, run.batch
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    engine, tensors = build(run, Mesh.build(run.mesh_shape, timeout))
    log = RunLog(dist.get_rank() == 0, run.start_iteration, batch.train_iters)
    on_first_rank(lambda: log.open(config), "the run's log cannot be written")
    log.say(headline)
    log.say("\n".join(summary_lines(config.data, (run.train, run.valid, run.test))))
    if config.checkpoint.save is not None:
        save = Path(config.checkpoint.save)
        on_first_rank(lambda: write_durably(save / CONFIG, to_yaml(config)), f"--save {save}: cannot be written")
    iteration = run.start_iteration
    if run.train is not None and iteration < batch.train_iters:
        with notice.deferred():
            iteration = _iterate(run, engine, tensors, log, notice)
    if iteration == batch.train_iters or config.training.skip_train:
        interval = config.evaluation.eval_interval
        evaluated = iteration > run.start_iteration and interval and iteration % interval == 0
        if run.valid is not None and not evaluated:
            _evaluate(run, engine, log, iteration, "valid")
        if run.test is not None:
            _evaluate(run, engine, log, iteration, "test")
    log.close()


def _iterate(
    run: PreparedRun,
    engine: Engine,
    tensors: EngineTensors,
    log: RunLog,
    notice: Notice,
) -> int:
    """The iterations of the run; returns the last one done."""
    config, batch = run.config, run.batch
    eval_interval, save_interval = config.evaluation.eval_interval, config.checkpoint.save_interval
    consumed, clock = run.consumed_samples, Clock()
    data = engine.mesh.data
    samples = batches(run.train, consumed, batch.micro_batch_size, data.rank, data.size, vocab_size=run.vocab_size)
    feed = micro_batches(samples, config.training.seed, engine.device, run.documents)
    for iteration in range(run.start_iteration + 1, batch.train_iters + 1):
        rate = learning_rate(config.optimizer, iteration, batch.train_iters)
        depths = micro_step_depths(config, batch, consumed)
        loss = engine.accumulate(balance(list(islice(feed, batch.micro_steps)), data), depths)
        norm = engine.step(rate)
        if not math.isfinite(norm):
            # the norm is global, so that every rank is here; the weights are spoilt, the last checkpoint is not
            raise UserError(
                f"the gradient norm is {norm} at iteration {iteration}, samples {consumed}.."
                f"{consumed + batch.global_batch_size - 1} of the run: stopped without saving; go on from the last "
                "checkpoint with a lower --lr or --clip-grad"
            )
        consumed += batch.global_batch_size
        clock.count(_forward_flops(run, depths))
        log.progress()

        last = iteration == batch.train_iters
        if iteration % config.logging.log_interval == 0 or last:
            dist.all_reduce(loss, group=data.handle)
            seconds = clock.seconds_per_iteration()
            report = IterationReport(
                iteration=iteration,
                consumed_samples=consumed,
                consumed_tokens=consumed * config.model.seq_length,
                loss=loss.item() / data.size,
                depth=sum(depths) / len(depths),
                lr=rate,
                grad_norm=norm,
                tokens_per_second=batch.global_batch_size * config.model.seq_length / seconds,
                seconds_per_iteration=seconds,
                model_tflops=clock.tflops_per_rank(dist.get_world_size()),
                memory_gib=peak_memory_gib(),
                seconds_left=seconds * (batch.train_iters - iteration),
            )
            log.iteration(report)
            clock.reset()

        with clock.paused():
            if run.valid is not None and eval_interval and iteration % eval_interval == 0:
                _evaluate(run, engine, log, iteration, "valid")
            reason = _reason_to_leave(run, iteration, notice)
            leave = reason is not None and not last
            if config.checkpoint.save is not None and (
                last or leave or (save_interval and iteration % save_interval == 0)
            ):
                log.say(f"saved {_save(run, engine, tensors, iteration, consumed)}")
        if leave:
            log.say(f"leaving after iteration {iteration}: {reason}")
            return iteration
    return batch.train_iters


def build(run: PreparedRun, mesh: Mesh) -> tuple[Engine, EngineTensors]:
    """The engine at the run's first iteration: with fresh weights, or the checkpoint's."""
    config = run.config
    if run.checkpoint is None:
        engine = build_engine(config, run.batch, mesh, run.pipeline)
        return engine, EngineTensors(engine.deepspeed)
    folder, index = run.checkpoint.folder, run.checkpoint.index
    verify_checkpoint(folder, index)
    moments = config.checkpoint.load_optim and not run.checkpoint.weights_only
    with open_checkpoint(folder, index) as tensors:
        engine = build_engine(config, run.batch, mesh, run.pipeline, lambda registry: load_weights(tensors, registry))
        engine_tensors = EngineTensors(engine.deepspeed, steps=index.optimizer_steps if moments else 0)
        load_optimizer(tensors, engine_tensors, engine.registry, moments=moments)
    return engine, engine_tensors


def _evaluate(run: PreparedRun, engine: Engine, log: RunLog, iteration: int, split: str) -> None:
    losses = evaluate(engine, getattr(run, split), run.config, run.batch, run.documents)
    log.evaluation(iteration, exits_to_evaluate(run.config), losses, split=split)


def _save(run: PreparedRun, engine: Engine, tensors: EngineTensors, iteration: int, consumed: int) -> Path:
    index = CheckpointIndex(
        iteration=iteration,
        consumed_samples=consumed,
        train_samples=run.batch.train_samples,
        optimizer_steps=tensors.steps_taken(),
        seed=run.config.training.seed,
        depths_per_step=None if run.config.model.layout.is_dense else run.batch.depths_per_step,
        past=run_past(run.config),
        vocab_size=run.vocab_size,
        model=model_facts(run.config.model),
    )
    checkpoint = run.config.checkpoint
    return save_checkpoint(
        checkpoint.save,
        tensors,
        engine.registry,
        engine.mesh,
        index,
        to_yaml(run.config),
        keep=checkpoint.save_total_limit,
    )


def _reason_to_leave(run: PreparedRun, iteration: int, notice: Notice) -> str | None:
    """Why to stop after this iteration, if at all; the same answer on every rank."""
    training = run.config.training
    if training.exit_interval and iteration % training.exit_interval == 0:
        return f"--exit-interval {training.exit_interval}"
    minutes = (time.monotonic() - notice.started) / 60
    late = training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins
    # signals and clocks differ between ranks: one that says stop is enough
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    asked = torch.tensor([late, notice.received is not None], dtype=torch.int32, device=device)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    late, signalled = asked.tolist()
    if signalled:
        return f"{notice.received or 'another rank'} asked for it"
    return f"--exit-duration-in-mins {training.exit_duration_in_mins}" if late else None


def _forward_flops(run: PreparedRun, depths: list[int]) -> int:
    """Forward FLOPs of one iteration over all ranks, at the depths it drew."""
    model = run.config.model
    per_token = sum(executed_flops_per_token(model, run.vocab_size, depth) for depth in depths) // len(depths)
    return per_token * run.batch.global_batch_size * model.seq_length
