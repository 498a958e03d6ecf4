"""The executor on gloo ranks: any depths, any placement and any exits equal a plain model; a fault has a name."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_rgpt.config import Config, Layout, plan_batch
from megatron_rgpt.model.micro_batch import MicroBatch
from megatron_rgpt.model.recurrent import build_model
from megatron_rgpt.parallel.mesh import ALONE, Mesh, MeshShape
from megatron_rgpt.pipeline.configure import configure_pipeline
from megatron_rgpt.pipeline.engine import StageError
from megatron_rgpt.pipeline.placement import parse_placement
from megatron_rgpt.pipeline.stage import build_stage
from megatron_rgpt.randomness import Noise
from megatron_rgpt.training.engine import Engine, build_engine
from tests.parity.trace import Trace, engine_trace, reference_trace, sample
from tests.ranks import RankPool

# R = 3; fp64 tells a wrong term from rounding
BASE = Config().changed(
    layout=Layout(1, 2, 3, 2),
    hidden_size=32,
    num_attention_heads=4,
    seq_length=12,
    vocab_size=257,
    micro_batch_size=2,
    global_batch_size=8,
    gate_bias=0.0,
    precision="fp64",
)
STEPS = {
    "no micro-batch reaches the core": [0, 0, 0, 0],
    "all depths are different and one is beyond R": [2, 0, 5, 1, 3],
    "a single micro-batch": [3],
}


def staged(stages: int, placement: str | None = None, **changes) -> Config:
    return BASE.changed(pipeline_model_parallel_size=stages, pipeline_placement=placement, **changes)


def batches(config: Config, count: int, size: int = 2, *, noise: bool = True) -> list[MicroBatch]:
    """Made-up micro-batches of `size` samples."""
    made = []
    for first in range(0, count * size, size):
        ordinals = tuple(range(first, first + size))
        tokens_BS1 = torch.stack([sample(config, ordinal) for ordinal in ordinals])
        made.append(MicroBatch(tokens_BS1[:, :-1], tokens_BS1[:, 1:], Noise(5, ordinals) if noise else None))
    return made


def engine_of(config: Config, timeout: timedelta | None = None) -> Engine:
    """The engine of this rank of the default process group. Collective."""
    parallel = config.parallel
    shape = MeshShape.of(
        dist.get_world_size(),
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
    )
    batch = plan_batch(config, shape.data)
    return build_engine(config, batch, Mesh.build(shape, timeout), configure_pipeline(config, batch))


def accumulated(
    config: Config, steps: Sequence[list[int]], posted_ahead: int | None = None
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Of each step, this rank's loss and gradients, as autograd makes them, of what some micro-batch reached."""
    engine, results = engine_of(config), []
    if posted_ahead is not None:
        engine._runner.posted_ahead = posted_ahead
    gradients: dict[str, torch.Tensor] = {}
    for entry in engine.registry:

        def add(gradient: torch.Tensor, name: str = entry.name) -> None:
            gradients[name] = gradients.get(name, 0) + gradient

        entry.parameter.register_hook(add)
    for depths in steps:
        gradients.clear()
        loss = engine.accumulate(batches(config, len(depths)), depths)
        results.append((loss.item(), dict(gradients)))
    return results


def plain(config: Config, depths: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same of a model in this process."""
    model, registry = build_model(config.model, config.data.vocab_size, config.training.seed)
    model.double()
    total = 0.0
    for (tokens_BS, labels_BS, noise, *_), depth in zip(batches(config, len(depths)), depths, strict=True):
        loss = model(tokens_BS, labels_BS, depth=depth, noise=noise) / len(depths)
        loss.backward()
        total += loss.item()
    return total, {entry.name: entry.parameter.grad for entry in registry}


def assert_equal_to_plain(parts: Sequence[tuple[float, dict[str, torch.Tensor]]], config: Config, depths) -> None:
    """Stages' losses and gradients, put together."""
    loss, gradients = plain(config, depths)
    assert parts[0][0] == pytest.approx(loss, rel=1e-12)
    assert all(other == 0 for other, _ in parts[1:])
    merged = {name: gradient for _, stage in parts for name, gradient in stage.items()}
    assert len(merged) == sum(len(stage) for _, stage in parts), "a parameter has gradients on two stages"
    for name, expected in gradients.items():
        # a stage that nothing reached has no gradients; a plain model has zeros
        actual = merged.get(name, torch.zeros_like(expected))
        difference = (actual - expected).norm().item()
        assert difference <= 1e-9 * expected.norm().item() + 1e-15, f"{name}: {difference}"


@pytest.mark.parametrize("recompute", ["none", "step"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_loss_and_gradients_of_any_depths_are_those_of_a_plain_model(stages, recompute, ranks: RankPool) -> None:
    config = staged(stages, recompute=recompute)
    by_rank = ranks.run(accumulated, config, list(STEPS.values()), world=stages)
    for parts, depths in zip(zip(*by_rank, strict=True), STEPS.values(), strict=True):
        assert_equal_to_plain(parts, config, depths)


PLACEMENTS = {
    "the coda lies on another stage": "core=1,1 coda=0,2",
    "the hub has no core": "core=0,2 coda=2,0",
    "the hub has nothing but the prelude": "core=0,1,1 coda=0,2,0",
    "a stage has coda and no core": "core=0,0,2 coda=1,1,0",
    "the coda is spread over all stages": "core=1,0,1 coda=0,1,1",
    "every block has a stage of its own": "core=0,1,0,1 coda=0,0,1,1",
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_gradients_do_not_depend_on_where_blocks_lie(placement: str, ranks: RankPool) -> None:
    stages = placement.split()[0].count(",") + 1
    config, depths = staged(stages, placement), [2, 0, 4, 1]
    parts = [steps[0] for steps in ranks.run(accumulated, config, [depths], world=stages)]
    assert_equal_to_plain(parts, config, depths)


@pytest.mark.parametrize("posted_ahead", [0, 1, 100])
def test_receives_may_be_posted_as_in_the_program_or_any_number_ahead(posted_ahead: int, ranks: RankPool) -> None:
    config, depths = staged(3, "core=1,0,1 coda=0,1,1"), [3, 0, 2, 1, 3, 1]
    parts = [steps[0] for steps in ranks.run(accumulated, config, [depths], posted_ahead, world=3)]
    assert_equal_to_plain(parts, config, depths)


# exits, micro-batches, samples in each
EVALUATIONS = [([0, 1, 2, 3], 3, 2), ([0, 3, 6], 2, 3), ([1], 1, 5), ([0], 4, 1)]


def evaluated(config: Config) -> list[list[float]]:
    engine = engine_of(config)
    return [
        engine.exit_losses(batches(config, count, size, noise=False), exits).tolist()
        for exits, count, size in EVALUATIONS
    ]


@pytest.mark.parametrize(
    ("stages", "placement", "tensor"),
    [(2, None, 1), (2, None, 2), (3, None, 1), (4, None, 1)]
    + [(text.split()[0].count(",") + 1, text, 1) for text in PLACEMENTS.values()],
)
def test_the_loss_at_every_exit_is_that_of_a_plain_model(stages, placement, tensor, ranks: RankPool) -> None:
    config = staged(stages, placement, tensor_model_parallel_size=tensor)
    model = build_model(config.model, config.data.vocab_size, config.training.seed)[0].double()
    expected = []
    with torch.no_grad():
        for exits, count, size in EVALUATIONS:
            losses = [
                model(batch.tokens_BS, batch.labels_BS, exits=exits)
                for batch in batches(config, count, size, noise=False)
            ]
            expected.append(sum(losses).tolist())
    for losses in ranks.run(evaluated, config, world=stages * tensor):
        for mine, theirs in zip(losses, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_the_stages_hold_each_weight_of_the_model_once(placement: str) -> None:
    stages, vocabulary, seed = placement.split()[0].count(",") + 1, BASE.data.vocab_size, BASE.training.seed
    _, whole = build_model(BASE.model, vocabulary, seed)
    placed = parse_placement(placement, BASE.model.layout, stages)
    parts = [build_stage(BASE.model, vocabulary, seed, placed, stage, ALONE)[1] for stage in range(stages)]
    entries = [entry for part in parts for entry in part]
    assert sorted(entry.name for entry in entries) == sorted(entry.name for entry in whole)
    assert [sum(entry.size for entry in part) for part in parts] == list(placed.parameters(BASE.model, vocabulary))
    for entry in entries:
        assert torch.equal(entry.parameter, whole[entry.name].parameter)


def test_bf16_over_stages_trains_as_fp32_does(ranks: RankPool) -> None:
    config = staged(2, micro_batch_size=1, depths_per_step=4, precision="bf16", lr=1e-3)
    one = config.changed(pipeline_model_parallel_size=1)
    trace: Trace = ranks.run(engine_trace, config, world=2)[0]
    whole: Trace = ranks.run(engine_trace, one, world=1)[0]
    exact = reference_trace(one.changed(precision="fp32"))
    assert trace.losses == pytest.approx(exact.losses, rel=2e-3)
    assert trace.norms == pytest.approx(exact.norms, rel=2e-2)
    for name, expected in exact.gradient.items():
        # bf16 has 8 bits; what stages add to that is far less
        assert (trace.gradient[name] - expected).norm() <= 8e-2 * expected.norm(), name
        assert (trace.gradient[name] - whole.gradient[name]).norm() <= 2e-2 * expected.norm(), name


def _raise(*_) -> None:
    raise ValueError("a fault made for this test")


def _die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _others_failed() -> dist.Store:
    return dist.PrefixStore("failed", dist.distributed_c10d._get_default_store())


def _hang(*_) -> None:
    """Do nothing until another rank has failed."""
    _others_failed().wait(["first"])
    raise ValueError("another rank did not wait any longer")


class OnCall:
    """A hook that acts at its n-th call."""

    def __init__(self, number: int, act: Callable[..., None]) -> None:
        self.left, self.act = number, act

    def __call__(self, *_) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


def step_with_fault(config: Config, stage: int, backward: bool, act: Callable[..., None]) -> None:
    """A step in which the third pass through the first core block of one stage does something."""
    engine = engine_of(config, timedelta(seconds=60 if act is not _hang else 4))
    if engine.mesh.pipeline.rank == stage:
        block = next(iter(engine.deepspeed.module.core.values()))
        hook = OnCall(3, act)
        if backward:
            block.mlp.down.weight.register_hook(hook)
        else:
            block.register_forward_pre_hook(hook)
    try:
        engine.accumulate(batches(config, 4), [1, 2, 3, 2])
    except StageError:
        _others_failed().set("first", "")
        raise


@pytest.mark.parametrize("backward", [False, True])
def test_an_exception_ends_the_run_with_rank_stage_visit_and_micro_batch(backward: bool, ranks: RankPool) -> None:
    kind = "backward" if backward else "forward"
    where = rf"rank 1, pipeline stage 1: {kind} of visit \d+ of micro-batch [0-3]: a fault made for this test"
    with pytest.raises(StageError, match=where):
        ranks.run(step_with_fault, staged(3), 1, backward, _raise, world=3)


def assert_all_name_themselves(ends: list[object], but: int) -> None:
    for rank, end in enumerate(ends):
        where = rf"StageError: rank {rank}, pipeline stage {rank}: \w+ of visit \d+ of micro-batch [0-3]: "
        assert rank == but or re.search(where, str(end)), str(end)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_stage_ends_the_others_each_saying_where_it_was(stage: int, backward: bool, ranks: RankPool) -> None:
    config = staged(3, "core=1,1,1 coda=2,0,0", layout=Layout(1, 3, 3, 2))
    ends = ranks.outcomes(step_with_fault, config, stage, backward, _die, world=3, timeout_seconds=60)
    assert "was killed by SIGKILL" in str(ends[stage])
    assert_all_name_themselves(ends, but=stage)


def test_a_stage_that_hangs_ends_the_others_when_the_timeout_is_over(ranks: RankPool) -> None:
    ends = ranks.outcomes(step_with_fault, staged(2), 1, False, _hang, world=2, timeout_seconds=60)
    assert_all_name_themselves(ends, but=1)
