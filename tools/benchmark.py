#!/usr/bin/env python
"""Measure the model and the loop as ratios within one run: interleaved rounds, medians.

tools/benchmark.py model    the hoisted model against a direct transcription of the paper's listing
tools/benchmark.py loop     a training iteration against bare forward, backward and optimizer
tools/benchmark.py memory   optimizer memory per rank under ZeRO-0 and ZeRO-1 on 2 ranks
tools/benchmark.py save     saving a checkpoint against writing and fsyncing the same bytes plainly
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rgpt.config import Config, Layout, ModelConfig, plan_batch
from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.model.counts import executed_flops_per_token
from megatron_rgpt.model.recurrent import RecurrentTransformer, build_model
from megatron_rgpt.randomness import Noise


def interleaved_medians(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate: every round runs each once, in rotating order, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            _synchronize()
            start = time.perf_counter()
            candidates[name]()
            _synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def listing_loss(model: RecurrentTransformer, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """The paper's Listing A.1 as it stands, on the model's own blocks: concatenations and fresh noise at every step."""
    config, rule = model.config, model.rule
    w_proj = torch.cat([rule.projection.state.weight, rule.projection.anchor.weight], dim=1)
    first = torch.cat([rule.gate.state.weight, rule.gate.anchor.weight], dim=1)
    h_SBD = model.embedding(tokens_BS)
    for block in model.prelude:
        h_SBD = block(h_SBD)
    h_pre_SBD = h_SBD
    for _ in range(config.layout.recurrences):
        noisy_SBD = h_SBD + config.state_noise_std * torch.randn_like(h_SBD)
        o_SBD = F.linear(torch.cat([noisy_SBD, h_pre_SBD], dim=-1), w_proj)
        for block in model.core:
            o_SBD = block(o_SBD)
        both = torch.cat([rule.gate.state_norm(h_SBD), rule.gate.anchor_norm(h_pre_SBD)], dim=-1)
        logit_SBD = rule.gate.out(F.silu(F.linear(both, first, rule.gate.anchor.bias)))
        noise_SBD = config.gate_noise_std * torch.randn_like(h_SBD)
        g_SBD = torch.sigmoid(logit_SBD / config.gate_temperature + noise_SBD)
        h_SBD = g_SBD * h_SBD + (1 - g_SBD) * o_SBD
    for block in model.coda:
        h_SBD = block(h_SBD)
    return model.head(h_SBD, labels_BS).mean()


def benchmark_model(args: argparse.Namespace) -> None:
    """Forward and backward at r = R; the executed-FLOPs count predicts the ratio."""
    config = ModelConfig(
        layout=Layout.parse(args.layout),
        hidden_size=args.hidden_size,
        num_attention_heads=args.hidden_size // 64,
        seq_length=args.seq_length,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, _ = build_model(config, args.vocab_size, seed=1)
    model.to(device)
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, args.seq_length + 1)
    tokens = torch.randint(args.vocab_size, shape, generator=generator).to(device)
    noise = Noise(1, tuple(range(args.batch)))

    def ours(noise: Noise | None) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:], noise=noise).backward()

        return run

    def listing() -> None:
        model.zero_grad()
        listing_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()

    def head() -> None:
        model.zero_grad()
        states = torch.zeros(args.seq_length, args.batch, args.hidden_size, device=device, requires_grad=True)
        model.head(states, tokens[:, 1:]).mean().backward()

    medians = interleaved_medians(
        {"ours": ours(noise), "listing": listing, "ours without noise": ours(None), "head": head}, args.rounds
    )
    executed = executed_flops_per_token(config, args.vocab_size)
    unhoisted = ModelConfig(**{**vars(config), "hoist_anchor": False})
    predicted = executed_flops_per_token(unhoisted, args.vocab_size) / executed
    ratio = medians["listing"] / medians["ours"]
    tokens_done = args.batch * args.seq_length
    print(
        f"{config.layout}, d {args.hidden_size}, S {args.seq_length}, V {args.vocab_size}, batch {args.batch}, {device}"
    )
    for name, seconds in medians.items():
        print(f"  {name:<20} {seconds * 1e3:9.1f} ms")
    print(f"  ours runs at {3 * executed * tokens_done / medians['ours'] / 1e9:.1f} GFLOP/s")
    print(f"listing / ours         {ratio:.3f}")
    print(f"predicted by FLOPs     {predicted:.3f}")
    print(f"measured / predicted   {ratio / predicted:.3f}")
    print(f"noise's share of ours  {1 - medians['ours without noise'] / medians['ours']:.3f}")
    print(f"head's share of ours   {medians['head'] / medians['ours']:.3f}")


def benchmark_loop(args: argparse.Namespace) -> None:
    """Iterations of the main job on one rank, by its own log, against forward, backward and AdamW alone."""
    from megatron_rgpt.parallel.launch import resolve, start
    from megatron_rgpt.parallel.notice import Notice
    from megatron_rgpt.training.loop import train
    from megatron_rgpt.training.prepare import prepare, resolve_config
    from megatron_rgpt.training.report import read_metrics

    start(resolve(os.environ), timeout_minutes=5)
    iterations, jobs, bare = 8, [], []
    with tempfile.TemporaryDirectory() as folder:
        config = Config().changed(
            layout=Layout.parse("1+1x10+1"),
            hidden_size=128,
            num_attention_heads=4,
            seq_length=256,
            micro_batch_size=8,
            global_batch_size=8,
            depth_sampling="fixed",
            train_iters=iterations,
            log_interval=iterations // 2,
            data_path=(_random_pair(folder, 256 * 8 * iterations * 4),),
            split="100,0,0",
            eval_iters=0,
            save=f"{folder}/run",
        )
        resolved = resolve_config(config, 1)
        config, batch = resolved.config, resolved.batch
        step = _bare_step(config)
        for number in range(args.rounds + 1):
            run = f"{folder}/run{number}"
            train(prepare(replace(resolved, config=config.changed(save=run)), first_rank=True), "", Notice(()))
            start_seconds = time.perf_counter()
            for _ in range(iterations // 2):
                step()
            if number:
                bare.append((time.perf_counter() - start_seconds) / (iterations // 2))
                # of two log intervals the first warms up the engine
                speed = read_metrics(run)[0][-1]["tokens_per_second"]
                jobs.append(batch.global_batch_size * config.model.seq_length / speed)
    job, alone = statistics.median(jobs), statistics.median(bare)
    print(f"iteration of the main job        {job * 1e3:8.1f} ms")
    print(f"forward, backward and optimizer  {alone * 1e3:8.1f} ms")
    print(f"job / bare                       {job / alone:8.3f}")


def _random_pair(folder: str, tokens: int) -> str:
    """Prefix of an indexed pair of random bytes."""
    from megatron_rgpt.data.indexed_writer import IndexedWriter

    prefix = f"{folder}/random_text_document"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(np.random.default_rng(1).integers(0, 256, tokens))
    return prefix


def _bare_step(config: Config) -> Callable[[], None]:
    """One iteration with nothing around it, on tokens that are already there."""
    model, registry = build_model(config.model, config.data.vocab_size, seed=1)
    optimizer = torch.optim.AdamW(registry.optimizer_groups(0.1), lr=1e-4, fused=True)
    samples = config.training.micro_batch_size
    tokens = torch.randint(config.data.vocab_size, (samples, config.model.seq_length + 1))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:], noise=Noise(1, tuple(range(samples)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def benchmark_memory(args: argparse.Namespace) -> None:
    """Bytes of AdamW's moments held by each of 2 ranks."""
    port = 20000 + os.getpid() % 20000
    torch.multiprocessing.spawn(_memory_on_rank, args=(port,), nprocs=2)


def _memory_on_rank(rank: int, port: int) -> None:
    from megatron_rgpt.checkpoint.tensors import EngineTensors
    from megatron_rgpt.checkpoint.totals import MOMENTS
    from megatron_rgpt.parallel.launch import Placement, start
    from megatron_rgpt.parallel.mesh import Mesh, MeshShape
    from megatron_rgpt.training.engine import Engine

    start(Placement(rank, 2, rank, 2, "127.0.0.1", port, "benchmark"), timeout_minutes=5)
    config = Config().changed(
        layout=Layout.parse("2+5x4+2"), hidden_size=256, num_attention_heads=4, vocab_size=8192, precision="fp32"
    )
    held = {}
    for stage in (0, 1):
        model, registry = build_model(config.model, config.data.vocab_size, seed=1)
        mesh = Mesh.build(MeshShape.of(2))
        engine = Engine(model, registry, config.changed(zero_stage=stage), plan_batch(config, 2), mesh).deepspeed
        EngineTensors(engine)
        states = engine.basic_optimizer.state.values()
        held[stage] = sum(state[moment].nbytes for state in states for moment in MOMENTS)
    if rank == 0:
        for stage, size in held.items():
            print(f"ZeRO-{stage}: {size / 2**20:.1f} MiB of moments per rank, 2 ranks")
        print(f"ZeRO-1 / ZeRO-0: {held[1] / held[0]:.3f}")


def benchmark_save(args: argparse.Namespace) -> None:
    """Save 400 MB, ZeRO-1 on one rank; and write the same files' bytes plainly in the same folder."""
    from megatron_rgpt.checkpoint.fits import model_facts
    from megatron_rgpt.checkpoint.layout import CheckpointIndex
    from megatron_rgpt.checkpoint.save import save_checkpoint
    from megatron_rgpt.checkpoint.tensors import EngineTensors
    from megatron_rgpt.checkpoint.totals import MOMENTS
    from megatron_rgpt.parallel.launch import Placement, start
    from megatron_rgpt.parallel.mesh import Mesh, MeshShape
    from megatron_rgpt.training.engine import build_engine

    start(Placement(0, 1, 0, 1, "127.0.0.1", 20000 + os.getpid() % 20000, "benchmark"), timeout_minutes=5)
    config = Config().changed(
        layout=Layout.parse(args.layout), hidden_size=args.hidden_size, num_attention_heads=4, vocab_size=8192
    )
    engine = build_engine(
        config.changed(precision="fp32", zero_stage=1), plan_batch(config, 1), Mesh.build(MeshShape.of(1)), None
    )
    tensors = EngineTensors(engine.deepspeed)
    for entry in engine.registry:
        # bytes that no file system can store as holes
        for moment in MOMENTS:
            tensors.write(entry, moment, torch.rand(entry.shape))
    index = CheckpointIndex(1, 1, 1, 1, 1, 1, 8192, model_facts(config.model))

    def save(folder: Path) -> None:
        save_checkpoint(str(folder), tensors, engine.registry, engine.mesh, index, "")

    def plain(folder: Path) -> None:
        folder.mkdir()
        for name, content in contents.items():
            with (folder / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        save(Path(scratch, "first"))
        contents = {path.name: path.read_bytes() for path in Path(scratch, "first").glob("*/*")}
        seconds: dict[str, list[float]] = {"save": [], "plain": []}
        for number in range(args.rounds + 1):
            for candidate in ((save, plain), (plain, save))[number % 2]:
                folder = Path(scratch, candidate.__name__)
                before = time.perf_counter()
                candidate(folder)
                if number:
                    seconds[candidate.__name__].append(time.perf_counter() - before)
                shutil.rmtree(folder)
    saving, writing = (statistics.median(seconds[name]) for name in ("save", "plain"))
    print(f"checkpoint                       {sum(map(len, contents.values())) / 1e6:8.1f} MB")
    print(f"save_checkpoint                  {saving * 1e3:8.1f} ms")
    print(f"write and fsync the same bytes   {writing * 1e3:8.1f} ms")
    print(f"save / plain                     {saving / writing:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help=benchmark_model.__doc__)
    model.add_argument("--layout", default="1+1x10+1")
    model.add_argument("--hidden-size", type=int, default=768)
    model.add_argument("--seq-length", type=int, default=256)
    model.add_argument("--vocab-size", type=int, default=50257)
    model.add_argument("--batch", type=int, default=2)
    loop = commands.add_parser("loop", help=benchmark_loop.__doc__)
    memory = commands.add_parser("memory", help=benchmark_memory.__doc__)
    save = commands.add_parser("save", help=benchmark_save.__doc__)
    save.add_argument("--layout", default="2+5x4+2")
    save.add_argument("--hidden-size", type=int, default=512)
    save.add_argument("--folder", default=".", help="where to write; what is measured is its disk [.]")
    functions = {model: benchmark_model, loop: benchmark_loop, memory: benchmark_memory, save: benchmark_save}
    for command, function in functions.items():
        command.set_defaults(function=function)
        command.add_argument("--rounds", type=int, default=9, help="measured rounds, after one of warm-up [9]")
    args = parser.parse_args()
    with exit_on_user_error():
        args.function(args)


if __name__ == "__main__":
    main()
