"""Steps of the pipeline executed on gloo ranks of this machine, against the time that their plan gives.

`sleeping` puts a sleep of the planned length in the place of each pass: it tests the executor (order, transfers,
waiting), not the cost model. `computing` runs a small model, planned with what its visits were measured to cost.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.parallel.mesh import ALONE, Mesh, MeshShape
from megatron_rgpt.pipeline.costs import Cost, Costs, flops_costs
from megatron_rgpt.pipeline.engine import StageRunner
from megatron_rgpt.pipeline.paths import Part, Visit
from megatron_rgpt.pipeline.placement import Placement, parse_placement
from megatron_rgpt.pipeline.schedule import Plan, Planner, plan
from megatron_rgpt.pipeline.segments import Segment, VisitRunner
from megatron_rgpt.pipeline.stage import build_stage

VOCAB_SIZE = 50257
EFFORT = 600
"""Simulated steps per plan: all steps of a row share one plan, made before they are timed."""
NANOSECONDS = 10**9


@dataclass(frozen=True)
class Sleeps:
    """A row of sleeping stages."""

    layout: str
    placement: str
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.placement.split()[0].count(",") + 1


SLEEPING = (
    Sleeps("2+5x4+2", "core=1,4 coda=2,0", 8),
    Sleeps("1+5x6+5", "core=0,2,3 coda=3,2,0", 9),
    Sleeps("3+30x6+3", "core=6,8,8,8 coda=2,1,0,0", 12),
)


def sleeping(rounds: int, seconds: float) -> None:
    """`seconds`: a planned step. Two make a pass last tens of milliseconds, so that the clock's grain counts little."""
    print("Executed step / plan with a sleep for each pass, of the plan's length: a test of the executor alone.")
    print(f"{'layout':<9} {'P':>2} {'m':>3} | plan    | executed (median of {rounds}) | ratio (rounds)")
    for row in SLEEPING:
        planned, executed = _on_ranks(row.stages, _sleep, row, rounds, seconds)
        ratios = " ".join(f"{time_ / planned:.3f}" for time_ in executed)
        usual = statistics.median(executed)
        print(
            f"{row.layout:<9} {row.stages:>2} {row.micro_batches:>3} | {planned:.3f} s | {usual:.3f} s"
            f"                | {usual / planned:.3f} ({ratios})",
            flush=True,
        )


def computing(rounds: int) -> None:
    print("Executed step / plan with real compute on 2 ranks of 1 thread; a visit costs the mean of its kind in these")
    print(
        "steps. Replayed: the plan's order where each pass takes what it took, which leaves the executor's own share."
    )
    planned, executed, replayed, measured = _on_ranks(2, _compute, rounds)
    for name, cost in measured.items():
        print(f"  {name:<42} forward {cost.forward / 1e6:6.2f} ms, backward {cost.backward / 1e6:6.2f} ms")
    mean = statistics.mean(executed)
    print(f"plan {planned:.3f} s, executed {mean:.3f} s (mean of {rounds}): ratio {mean / planned:.3f}")
    ratios = [seconds / theirs for seconds, theirs in zip(executed, replayed, strict=True)]
    print(f"executed / replayed: {' '.join(f'{ratio:.3f}' for ratio in ratios)}, mean {statistics.mean(ratios):.3f}")


def _sleep(row: Sleeps, rounds: int, seconds: float) -> tuple[float, list[float]]:
    layout = Layout.parse(row.layout)
    costs = flops_costs(ModelConfig(layout=layout, hidden_size=1024, num_attention_heads=16), VOCAB_SIZE)
    placement, depths = parse_placement(row.placement, layout, row.stages), _dealt(layout, row.micro_batches)
    planner = Planner(placement, costs, effort=EFFORT)
    seconds_per_unit = seconds / planner.plan(depths).makespan
    # what travels is tiny, and so is the model that nobody runs
    tiny = ModelConfig(layout=layout, hidden_size=8, num_attention_heads=1, seq_length=8)
    runner = _runner(tiny, 50, placement, planner)
    runner._visits = _Sleeper(runner._model.stage, costs, seconds_per_unit)
    return seconds, _timed(runner, _made_up(tiny, 50, row.micro_batches), depths, rounds)


def _compute(rounds: int) -> tuple[float, list[float], list[float], dict[str, Cost]]:
    config = ModelConfig(layout=Layout.parse("1+3x3+1"), hidden_size=256, num_attention_heads=4, seq_length=256)
    placement, depths, vocabulary = parse_placement("core=1,2 coda=1,0", config.layout, 2), [3, 1, 2, 3, 1, 2], 2000
    batches = _made_up(config, vocabulary, len(depths))
    runner = _runner(config, vocabulary, placement, Planner(placement, flops_costs(config, vocabulary), effort=EFFORT))
    runner._visits = watch = _Stopwatch(runner._model)
    _timed(runner, batches, depths, 2)
    # the order of the steps that count follows from costs that were measured, too
    runner._planner = Planner(placement, _Measured(watch.over_stages()), effort=EFFORT)
    watch.forget()
    executed = _timed(runner, batches, depths, rounds)
    costs = _Measured(watch.over_stages())
    planned = plan(placement, depths, costs, effort=EFFORT).makespan / NANOSECONDS
    passes = [[0]] * placement.stages
    dist.all_gather_object(passes, watch.passes)
    replayed = _replay(runner._planner.plan(depths), [iter(times) for times in passes], rounds)
    return planned, executed, replayed, {_name(*kind): cost for kind, cost in costs.by_kind.items()}


def _replay(step: Plan, passes: Sequence[Iterator[int]], rounds: int) -> list[float]:
    """Seconds of each step if its passes, in the plan's order, take these times and nothing else takes any."""
    graph, found = step.graph, []
    for _ in range(rounds):
        ready, clock = [0] * len(graph.stage), [0] * graph.stages
        for operation in step.run.log:
            if operation >= 0:
                stage = graph.stage[operation]
                clock[stage] = max(clock[stage], ready[operation]) + next(passes[stage])
                for later in graph.after[operation]:
                    ready[later] = max(ready[later], clock[stage])
        found.append(max(clock) / NANOSECONDS)
    return found


def _timed(runner: StageRunner, batches: Sequence[MicroBatch], depths: Sequence[int], rounds: int) -> list[float]:
    """Seconds of each of some steps until the last stage is done; the plan is made before."""
    runner._planner.plan(depths)
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        runner.train(batches, depths)
        dist.barrier()
        found.append(time.perf_counter() - start)
    return found


class _Sleeper:
    """Stands in for `VisitRunner`: passes that only take time, and hand on tensors."""

    def __init__(self, stage: int, costs: Costs, seconds_per_unit: float) -> None:
        self._stage, self._costs, self._seconds_per_unit = stage, costs, seconds_per_unit

    def forward(self, parts: Sequence[Part], passage, input_sBD: torch.Tensor | None, loss_scale: float):
        cost = self._costs.of(Visit(self._stage, tuple(parts), None, ()))
        time.sleep(cost.forward * self._seconds_per_unit)
        output = torch.zeros(8, 1, 8, requires_grad=True)
        if any(part.kind in ("prelude", "gate") for part in parts):
            passage.state_sBD = output
        return output, [_SleepingSegment(cost.backward * self._seconds_per_unit, input_sBD)]


@dataclass
class _SleepingSegment:
    seconds: float
    input_sBD: torch.Tensor | None

    def backward(self) -> None:
        time.sleep(self.seconds)
        if self.input_sBD is not None:
            self.input_sBD.grad = torch.zeros_like(self.input_sBD)


Kind = tuple[int, tuple[tuple[str, int], ...]]
"""What a visit costs depends on: its stage, and the names and sizes of its parts."""


def _kind(stage: int, parts: Sequence[Part]) -> Kind:
    return stage, tuple((part.kind, len(part.blocks)) for part in parts)


def _name(stage: int, parts: tuple[tuple[str, int], ...]) -> str:
    return f"stage {stage}: " + " ".join(f"{name}x{size}" if size else name for name, size in parts)


class _Stopwatch(VisitRunner):
    """Times the passes of visits by their kind."""

    def __init__(self, model) -> None:
        super().__init__(model, recompute=False)
        self._stage = model.stage
        self.forget()

    def forget(self) -> None:
        self._forward, self._backward = defaultdict(list), defaultdict(list)
        self.passes: list[int] = []

    def forward(self, parts: Sequence[Part], passage, input_sBD: torch.Tensor | None, loss_scale: float):
        start = time.perf_counter_ns()
        output, segments = super().forward(parts, passage, input_sBD, loss_scale)
        kind = _kind(self._stage, parts)
        self._count(self._forward[kind], start)
        return output, [_TimedSegments(segments, partial(self._count, self._backward[kind]))]

    def _count(self, times: list[int], start: int) -> None:
        times.append(time.perf_counter_ns() - start)
        self.passes.append(times[-1])

    def over_stages(self) -> dict[Kind, Cost]:
        """Mean costs of all stages' visits, the same on all ranks. Collective."""
        mine = {
            kind: Cost(int(statistics.mean(times)), int(statistics.mean(self._backward[kind])), 0)
            for kind, times in self._forward.items()
        }
        stages: list[dict[Kind, Cost]] = [{}] * dist.get_world_size()
        dist.all_gather_object(stages, mine)
        return {kind: cost for stage in stages for kind, cost in stage.items()}


@dataclass
class _TimedSegments:
    segments: list[Segment]
    count: Callable[[int], None]

    def backward(self) -> None:
        start = time.perf_counter_ns()
        for segment in reversed(self.segments):
            segment.backward()
        self.count(start)


@dataclass(frozen=True)
class _Measured:
    """Costs by kind of visit, in nanoseconds, in the place of `Costs`."""

    by_kind: dict[Kind, Cost]
    hop: int = 0

    def of(self, visit: Visit) -> Cost:
        return self.by_kind[_kind(visit.stage, visit.parts)]


def _dealt(layout: Layout, count: int) -> list[int]:
    return [1 + index % layout.recurrences for index in range(count)]


def _made_up(config: ModelConfig, vocab_size: int, count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    shape = (count, 1, config.seq_length + 1)
    return [
        MicroBatch(tokens_BS1[:, :-1], tokens_BS1[:, 1:], None)
        for tokens_BS1 in torch.randint(vocab_size, shape, generator=generator)
    ]


def _runner(config: ModelConfig, vocab_size: int, placement: Placement, planner: Planner) -> StageRunner:
    mesh = Mesh.build(MeshShape(placement.stages, 1, 1))
    model, _ = build_stage(config, vocab_size, 1, placement, mesh.pipeline.rank, ALONE)
    return StageRunner(model, mesh, planner, recompute=False, device=torch.device("cpu"))


def _on_ranks(world: int, function: Callable, *args):
    """What `function(*args)` returns on rank 0 of a fresh gloo group of processes."""
    # The store lives here, on a port the kernel picked
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(theirs, rank, world, store.port, function, args)) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        for rank in ranks:
            rank.join()


def _rank(pipe, rank: int, world: int, port: int, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world)
    result = function(*args)
    if rank == 0:
        pipe.send(result)
    dist.barrier()
    dist.destroy_process_group()
