"""The looped pipeline against unrolled ones, in simulated time: one simulator, one cost model, one search for all.

python tools/benchmark_pipeline.py figures     # busy shares and ratios of the published layouts
python tools/benchmark_pipeline.py uniform     # the same where depths are drawn anew each step, planned step by step
python tools/benchmark_pipeline.py planning    # what planning a step costs, against the step
python tools/benchmark_pipeline.py executed    # steps run on gloo ranks of this machine, against their plans

Costs are the model's FLOPs at S 1,024 and V 50,257, backward = 2 forwards, no time between stages. At most 2 P
micro-batches are in flight, in the ring and unrolled alike. The unrolled pipeline is what a stock pipeline module makes
of the loop: prelude, R tied copies of the core, coda and head cut into P consecutive pieces; a micro-batch of depth r
passes the copies behind r at no cost. `best split` balances the pieces by expected work, `stock split` by blocks, as if
every copy always ran. Both get the search that the ring gets; `1F1B` is the order in which a stock pipeline runs the
best split instead, micro-batches as dealt. A small --effort favours the ring: the search first tries what suits it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.pipeline.costs import Costs, flops_costs
from megatron_rgpt.pipeline.graph import Graph, Job, Task, bounds, build_graph
from megatron_rgpt.pipeline.placement import parse_placement
from megatron_rgpt.pipeline.placement_search import search_placement
from megatron_rgpt.pipeline.policies import search
from megatron_rgpt.pipeline.schedule import USUAL_LIMITS, plan, quick_effort

VOCAB_SIZE = 50257


@dataclass(frozen=True)
class Row:
    """A layout of the figures with the least busy share of the ring, and ratio to the unrolled best split, to reach."""

    layout: str
    hidden_size: int
    stages: int
    micro_batches: int
    busy_share: float
    ratio: float

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            layout=Layout.parse(self.layout), hidden_size=self.hidden_size, num_attention_heads=self.hidden_size // 64
        )

    def __str__(self) -> str:
        return f"{self.layout:<9} {self.stages:>2} {self.micro_batches:>3}"


FIGURES = (
    Row("3+30x6+3", 1280, 2, 12, 0.96, 1.12),
    Row("3+30x6+3", 1280, 4, 18, 0.92, 1.28),
    Row("3+30x6+3", 1280, 8, 36, 0.87, 1.30),
    Row("2+20x4+2", 1024, 2, 8, 0.94, 1.09),
    Row("2+20x4+2", 1024, 4, 16, 0.90, 1.18),
    Row("2+20x4+2", 1024, 8, 32, 0.86, 1.27),
    Row("1+5x6+5", 1280, 2, 12, 0.95, 1.05),
    Row("1+5x6+5", 1280, 4, 18, 0.84, 1.13),
    Row("2+5x4+2", 1024, 2, 8, 0.90, 1.00),
    Row("2+5x4+2", 1024, 4, 16, 0.78, 1.03),
)
PLANNING = (
    # layout, hidden size, placement, micro-batches
    ("3+30x8+3", 1280, "core=2,4,4,4,4,4,4,4 coda=0,1,1,1,0,0,0,0", 64),
    ("3+30x6+3", 1280, "core=6,8,8,8 coda=2,1,0,0", 32),
    ("2+5x4+2", 1024, "core=1,4 coda=2,0", 16),
)


def dealt(recurrences: int, count: int) -> list[int]:
    """Depths 1..R, each as often as the others."""
    return [1 + index % recurrences for index in range(count)]


class Unrolled:
    """The loop as R tied copies of the core, cut into consecutive pieces."""

    def __init__(self, config: ModelConfig, costs: Costs, stages: int, chance: Sequence[float]) -> None:
        """`chance[k]`: how much copy k counts when the pieces are balanced."""
        layout, self.costs, self.stages = config.layout, costs, stages
        modulation = costs.project.forward + costs.gate.forward
        core = costs.block.forward + modulation // layout.core
        # (copy, forward time); what always runs counts as copy -1
        self.items = [(-1, costs.block.forward)] * layout.prelude
        self.items += [(copy, core) for copy in range(layout.recurrences) for _ in range(layout.core)]
        self.items += [(-1, costs.block.forward)] * layout.coda + [(-1, costs.head.forward)]
        self.cuts = self._balance([time * (1 if copy < 0 else chance[copy]) for copy, time in self.items])

    def _balance(self, weights: Sequence[float]) -> list[int]:
        """Where pieces start, for the least largest sum of weights."""

        def cut(most: float) -> list[int]:
            starts, total = [0], 0.0
            for index, weight in enumerate(weights):
                if total + weight > most:
                    starts.append(index)
                    total = 0.0
                total += weight
            return starts

        low, high = max(weights), sum(weights)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if len(cut(middle)) <= self.stages else (middle, high)
        return cut(high)

    def job(self, depth: int) -> Job:
        times = [0] * self.stages
        for index, (copy, time_) in enumerate(self.items):
            if copy < depth:
                times[sum(start <= index for start in self.cuts) - 1] += time_
        times[0] += self.costs.anchor.forward if depth else 0
        return tuple(
            Task(stage, time_, 2 * time_, 0, stage - 1 if stage else None) for stage, time_ in enumerate(times)
        )

    def graph(self, depths: Sequence[int]) -> Graph:
        return build_graph([self.job(depth) for depth in depths], self.stages)


def one_forward_one_backward(graph: Graph) -> int:
    """Time of an unrolled step under 1F1B: jobs in order, stage s starts with P - s forward passes."""
    orders = []
    for stage in range(graph.stages):
        forwards = [first + stage for first in graph.first]
        backwards = [first + graph.stages + stage for first in graph.first]
        ahead = min(graph.stages - stage, graph.jobs)
        order = forwards[:ahead]
        for index, backward in enumerate(backwards):
            order += [backward, *forwards[ahead + index : ahead + index + 1]]
        orders.append(order)
    ready: dict[int, int] = {first: 0 for first in graph.first}
    clock, at = [0] * graph.stages, [0] * graph.stages
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order) and order[at[stage]] in ready:
                operation = order[at[stage]]
                clock[stage] = max(clock[stage], ready[operation]) + graph.duration[operation]
                for later in graph.after[operation]:
                    ready[later] = clock[stage]
                at[stage] += 1
    return max(clock)


def busy_share(graph: Graph, makespan: int) -> float:
    return sum(graph.duration) / graph.stages / makespan


def figures(rows: Sequence[Row], seeds: int, effort: int) -> None:
    print(f"Depths 1..R dealt equally; {effort} simulated steps per search, of the ring and of the unrolled alike.")
    print(f"Means of {seeds} seeds: of the local search, and of the order in which micro-batches are dealt to 1F1B.")
    print("bound: no schedule on this placement is busier; most: no ratio is larger (unrolled time / ring's bound).")
    print("A figure to reach that is missed is marked *.")
    print(
        f"{'layout':<9} {'P':>2} {'m':>3} | ring   ask  bound | best  ratio   ask  most "
        "| 1F1B  ratio | stock ratio | placement"
    )
    for row in rows:
        config, depths = row.config, dealt(row.config.layout.recurrences, row.micro_batches)
        costs = flops_costs(config, VOCAB_SIZE)
        placement = search_placement(config, VOCAB_SIZE, row.stages, costs, depths)
        ring = plan(placement, depths, costs, effort=1).graph
        chance = [1 - copy / config.layout.recurrences for copy in range(config.layout.recurrences)]
        best_split = Unrolled(config, costs, row.stages, chance)
        best = best_split.graph(depths)
        stock = Unrolled(config, costs, row.stages, [1.0] * len(chance)).graph(depths)
        times = [
            [search(graph, USUAL_LIMITS.caps(row.stages), effort, seed=seed).makespan for graph in (ring, best, stock)]
            + [one_forward_one_backward(best_split.graph(random.Random(seed).sample(depths, len(depths))))]
            for seed in range(seeds)
        ]
        shares = [
            statistics.mean(busy_share(graph, makespan) for makespan in column)
            for graph, column in zip((ring, best, stock, best), zip(*times, strict=True), strict=True)
        ]
        ratios = [statistics.mean(time_[which] / time_[0] for time_ in times) for which in range(4)]
        least = bounds(ring).best
        print(
            f"{row} | {shares[0]:.3f}{'*' if shares[0] < row.busy_share else ' '} {row.busy_share:.2f} "
            f"{busy_share(ring, least):6.3f} | {shares[1]:.3f} {ratios[1]:5.3f}{'*' if ratios[1] < row.ratio else ' '} "
            f"{row.ratio:.2f} {statistics.mean(time_[1] for time_ in times) / least:5.3f} "
            f"| {shares[3]:.3f} {ratios[3]:5.2f} | {shares[2]:.3f} {ratios[2]:5.2f} | {placement}",
            flush=True,
        )


def uniform(rows: Sequence[Row], seeds: int) -> None:
    print(f"Depths drawn from U{{1..R}}, mean of {seeds} steps; each planned with the effort of a single step,")
    print("the placement and the split chosen once for depths dealt equally.")
    print(f"{'layout':<9} {'P':>2} {'m':>3} | ring  (least) bound | best split | ratio (least)")
    for row in rows:
        config, recurrences = row.config, row.config.layout.recurrences
        costs, effort = flops_costs(config, VOCAB_SIZE), quick_effort(row.stages)
        placement = search_placement(config, VOCAB_SIZE, row.stages, costs, dealt(recurrences, row.micro_batches))
        split = Unrolled(config, costs, row.stages, [1 - copy / recurrences for copy in range(recurrences)])
        ring, bound, unrolled, ratio = [], [], [], []
        for depths in drawn(recurrences, row.micro_batches, seeds):
            step = plan(placement, depths, costs)
            graph = split.graph(sorted(depths))
            time_ = search(graph, USUAL_LIMITS.caps(row.stages), effort).makespan
            ring.append(step.busy_share)
            bound.append(busy_share(step.graph, step.bounds.best))
            unrolled.append(busy_share(graph, time_))
            ratio.append(time_ / step.makespan)
        print(
            f"{row} | {statistics.mean(ring):.3f} ({min(ring):.3f}) {statistics.mean(bound):.3f} "
            f"| {statistics.mean(unrolled):.3f}      | {statistics.mean(ratio):.3f} ({min(ratio):.3f})",
            flush=True,
        )


def drawn(recurrences: int, count: int, seeds: int) -> Iterator[list[int]]:
    for seed in range(seeds):
        generator = random.Random(seed)
        yield [generator.randint(1, recurrences) for _ in range(count)]


def planning(seeds: int, tflops: float, micro_batch_size: int) -> None:
    print(
        f"One new multiset of uniform depths, median of {seeds}: CPU seconds to plan and to write one stage's program,"
    )
    print(f"against the step at {tflops:g} TFLOP/s a stage and {micro_batch_size} samples of 1,024 a micro-batch.")
    print(f"{'layout':<9} {'P':>2} {'m':>3} | operations | planning | step    | share | busy share")
    for layout, hidden_size, text, micro_batches in PLANNING:
        stages = text.split()[0].count(",") + 1
        row = Row(layout, hidden_size, stages, micro_batches, 0, 0)
        placement = parse_placement(text, row.config.layout, stages)
        costs = flops_costs(row.config, VOCAB_SIZE, micro_batch_size=micro_batch_size)
        seconds, steps = [], []
        for depths in drawn(row.config.layout.recurrences, micro_batches, seeds):
            start = time.process_time()
            steps.append(plan(placement, depths, costs))
            steps[-1].program(stages - 1)
            seconds.append(time.process_time() - start)
        step_seconds = statistics.mean(step.makespan for step in steps) / tflops / 1e12
        operations = round(statistics.mean(len(step.graph.stage) for step in steps))
        busy = statistics.mean(step.busy_share for step in steps)
        usual = statistics.median(seconds)
        share = usual / step_seconds
        print(f"{row} | {operations:>10} | {usual:.4f} s | {step_seconds:.3f} s | {share:5.2%} | {busy:.3f}")
    print("Where a step deals the depths equally (--depth-sampling stratified), one plan serves the run.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("figures", "uniform", "planning", "executed"))
    parser.add_argument("--layout", help="rows of this layout alone")
    parser.add_argument("--stages", type=int, help="rows of this many stages alone")
    parser.add_argument("--seeds", type=int, default=3, help="random orders, draws or searches that are averaged")
    parser.add_argument("--effort", type=int, default=3000, help="simulated steps per search")
    parser.add_argument("--tflops", type=float, default=400, help="speed of a stage, for `planning`")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples per micro-batch, for `planning`")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed, for `executed`")
    parser.add_argument("--seconds", type=float, default=2.0, help="a planned step of sleeps, for `executed`")
    args = parser.parse_args()
    rows = [row for row in FIGURES if args.layout in (None, row.layout) and args.stages in (None, row.stages)]
    if args.what == "figures":
        figures(rows, args.seeds, args.effort)
    elif args.what == "uniform":
        uniform(rows, args.seeds)
    elif args.what == "executed":
        # late: the rest needs no torch
        from executed_pipeline import computing, sleeping

        sleeping(args.rounds, args.seconds)
        computing(args.rounds)
    else:
        planning(args.seeds, args.tflops, args.micro_batch_size)


if __name__ == "__main__":
    main()
