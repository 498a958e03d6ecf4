"""The main job end to end on ranks: it learns, reports, evaluates every exit, saves, and goes on exactly."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from megatron_rgpt.checkpoint.layout import find_checkpoint, read_index
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.config import Config
from megatron_rgpt.config.flags import read_yaml
from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.notice import Notice
from tests.jobs import flags, job, metrics
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def whole_run(ranks: RankPool, byte_pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 iterations on 2 ranks under ZeRO-1, never stopped."""
    run = tmp_path_factory.mktemp("whole")
    ranks.run(job, flags(byte_pair, f"--save {run} --save-interval 4 --tensorboard-dir {run}/tb"), world=2)
    return run


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in checkpoint.glob("*.safetensors") for k, v in load_file(file).items()}


def numbers(run: Path) -> list[float]:
    """Every number of a run's records, in order."""
    values = [value for record in metrics(run) for _, value in sorted(record.items())]
    return [number for value in values for number in (value if isinstance(value, list) else [value])]


def test_metrics_have_every_iteration_and_every_exit(whole_run: Path) -> None:
    records = metrics(whole_run)
    iterations = [record for record in records if "loss" in record]
    assert [record["iteration"] for record in iterations] == list(range(1, 9))
    assert [record["consumed_samples"] for record in iterations] == list(range(8, 72, 8))
    assert all(set(r) == {"iteration", "consumed_samples", "loss", "depth", "lr", "grad_norm"} for r in iterations)
    evaluations = [record for record in records if "valid_loss" in record]
    assert [record["iteration"] for record in evaluations] == [4, 8]
    assert all(len(r["exit_losses"]) == 4 and r["exit_losses"][-1] == r["valid_loss"] for r in evaluations)


def test_training_lowers_the_loss(whole_run: Path) -> None:
    losses = [record["loss"] for record in metrics(whole_run) if "loss" in record]
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 257
    assert losses[-1] < losses[0] - 0.5


def test_tensorboard_has_the_scalars(whole_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole_run / "tb"))
    events.Reload()
    assert {"train/loss", "train/grad_norm", "train/lr", "valid/valid_loss", "valid_exits/0"} <= set(
        events.Tags()["scalars"]
    )
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 9))


def test_the_resolved_configuration_is_saved_and_can_be_run_again(whole_run: Path) -> None:
    config = Config().changed(**read_yaml(str(whole_run / "config.yaml")))
    assert config.data.vocab_size == 257
    assert config.depth.depths_per_step == 2
    assert yaml.safe_load((whole_run / "config.yaml").read_text())["layout"] == "1+1x3+1"


@pytest.mark.parametrize(
    ("world", "stage", "more"),
    [(2, 1, ""), (1, 0, ""), (2, 2, "--recompute step"), (2, 3, ""), (2, 0, "--depth-sampling stratified")],
)
def test_going_on_gives_the_losses_and_tensors_of_never_having_stopped(
    ranks: RankPool, byte_pair: str, tmp_path: Path, world: int, stage: int, more: str
) -> None:
    run = partial(ranks.run, job, world=world)
    more = f"--zero-stage {stage} {more}"
    run(flags(byte_pair, f"{more} --save {tmp_path / 'whole'}"))
    stopped = tmp_path / "stopped"
    run(flags(byte_pair, f"{more} --save {stopped} --load {stopped} --exit-interval 3"))
    assert (stopped / "latest").read_text() == "iter_0000003\n"
    run(flags(byte_pair, f"{more} --save {stopped} --load {stopped} --exit-interval 5"))
    run(flags(byte_pair, f"{more} --save {stopped} --load {stopped}"))
    assert metrics(stopped) == metrics(tmp_path / "whole")
    one, other = (tensors(find_checkpoint(str(folder))) for folder in (stopped, tmp_path / "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bf16_trains_near_fp32_and_goes_on_exactly_with_its_fp32_masters(
    ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    more = "--bf16 --zero-stage 1"
    argv = [flag for flag in flags(byte_pair) if flag not in ("--precision", "fp32")]
    ranks.run(job, [*argv, *f"{more} --save {tmp_path / 'whole'}".split()], world=2)
    stopped = tmp_path / "stopped"
    for last in ("--exit-interval 5", ""):
        ranks.run(job, [*argv, *f"{more} --save {stopped} --load {stopped} {last}".split()], world=2)
    ranks.run(job, flags(byte_pair, f"--save {tmp_path / 'fp32'}"), world=2)
    assert metrics(stopped) == metrics(tmp_path / "whole")
    half, single = (
        [record["loss"] for record in metrics(tmp_path / name) if "loss" in record] for name in ("whole", "fp32")
    )
    assert half == pytest.approx(single, rel=0.01)
    masters = tensors(find_checkpoint(str(stopped)))["core.0.mlp.up.weight"]
    assert masters.dtype == torch.float32 and not torch.equal(masters, masters.bfloat16().float())


def test_records_of_iterations_done_again_are_written_once(whole_run: Path, ranks: RankPool, byte_pair: str) -> None:
    before = metrics(whole_run)
    (whole_run / "latest").write_text("iter_0000004\n")
    ranks.run(job, flags(byte_pair, f"--save {whole_run} --load {whole_run} --save-interval 4"), world=2)
    assert metrics(whole_run) == before


def test_a_checkpoint_holds_logical_fp32_tensors_by_canonical_name(whole_run: Path) -> None:
    checkpoint = find_checkpoint(str(whole_run))
    index, held = read_index(checkpoint), tensors(checkpoint)
    model, _, _ = load_model(str(whole_run))
    names = {name for name, _ in model.named_parameters()}
    assert set(index.shapes) == names
    assert set(held) == names | {f"{m}.{name}" for m in ("exp_avg", "exp_avg_sq") for name in names}
    assert held["embedding.tokens"].shape == (257, 32)  # without the padding of the vocabulary
    assert all(list(held[name].shape) == shape for name, shape in index.shapes.items())
    assert (index.iteration, index.consumed_samples, index.optimizer_steps) == (8, 64, 8)


def test_finetuning_starts_at_iteration_0_with_the_weights_alone(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    more = f"--load {whole_run} --finetune --save {tmp_path / 'tuned'} --train-iters 2 --seed 5"
    ranks.run(job, flags(byte_pair, more), world=1)
    records = [record for record in metrics(tmp_path / "tuned") if "loss" in record]
    assert [record["iteration"] for record in records] == [1, 2]
    last_of_run = [record["loss"] for record in metrics(whole_run) if "loss" in record][-1]
    assert records[0]["loss"] == pytest.approx(last_of_run, abs=0.3)


def test_the_loop_may_be_longer_or_shorter_at_load(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    argv = flags(byte_pair, f"--load {whole_run} --skip-train --save {tmp_path / 'longer'}")
    argv[argv.index("1+1x3+1")] = "1+1x5+1"
    ranks.run(job, argv, world=1)
    (longer,) = metrics(tmp_path / "longer")
    assert longer["exit_losses"][:4] == pytest.approx(metrics(whole_run)[-1]["exit_losses"], rel=1e-5)
    assert len(longer["exit_losses"]) == 6


def test_evaluating_a_run_in_its_middle_evaluates_it(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    half = whole_run / "iter_0000004"
    ranks.run(job, flags(byte_pair, f"--load {half} --skip-train --save {tmp_path / 'half'}"), world=1)
    (record,) = metrics(tmp_path / "half")
    assert record["iteration"] == 4
    assert record["exit_losses"] == pytest.approx(metrics(whole_run)[4]["exit_losses"], rel=1e-5)


def test_a_finetuning_that_is_submitted_again_goes_on(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    argv = flags(byte_pair, f"--load {whole_run} --finetune --save {tmp_path / 'tuned'} --exit-interval 3")
    for last in ("iter_0000003", "iter_0000006"):
        ranks.run(job, argv, world=1)
        assert (tmp_path / "tuned" / "latest").read_text().strip() == last


def test_a_dense_run_goes_on_at_another_micro_batch_size(ranks: RankPool, byte_pair: str, tmp_path: Path) -> None:
    argv = flags(byte_pair, f"--layout 2 --save {tmp_path / 'run'} --load {tmp_path / 'run'}")
    ranks.run(job, [*argv, "--micro-batch-size", "1", "--exit-interval", "3"], world=1)
    ranks.run(job, [*argv, "--micro-batch-size", "4"], world=1)
    assert (tmp_path / "run" / "latest").read_text() == "iter_0000008\n"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_numbers_of_ranks_give_the_same_losses_when_d_is_pinned(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path, world: int
) -> None:
    micro = {1: 4, 2: 1, 4: 1}[world]
    ranks.run(job, flags(byte_pair, f"--save {tmp_path / 'run'} --micro-batch-size {micro}"), world=world)
    assert numbers(tmp_path / "run") == pytest.approx(numbers(whole_run), rel=1e-4)


def test_bf16_with_tensor_parallelism_trains_near_one_rank(ranks: RankPool, byte_pair: str, tmp_path: Path) -> None:
    argv = [flag for flag in flags(byte_pair) if flag not in ("--precision", "fp32")] + ["--bf16"]
    for stage in (1, 2, 3):
        tensor = ["--tensor-model-parallel-size", "2", "--zero-stage", str(stage)]
        ranks.run(job, [*argv, *tensor, "--save", str(tmp_path / f"two{stage}")], world=4)
    ranks.run(job, [*argv, "--save", str(tmp_path / "one")], world=1)
    for stage in (1, 2, 3):
        for name, tolerance in (("loss", 0.01), ("grad_norm", 0.1)):
            ours, theirs = ([r[name] for r in metrics(tmp_path / run) if name in r] for run in (f"two{stage}", "one"))
            assert ours == pytest.approx(theirs, rel=tolerance), (stage, name)


def test_a_resume_with_another_number_of_ranks_keeps_d(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = flags(byte_pair, f"--save {run} --load {run}")
    at = argv.index("--depths-per-step")
    default_d = argv[:at] + argv[at + 2 :]
    ranks.run(job, [*default_d, "--exit-interval", "3"], world=2)  # D = 2, its micro-steps
    ranks.run(job, [*default_d, "--micro-batch-size", "4"], world=1)
    assert numbers(run) == pytest.approx(numbers(whole_run), rel=1e-4)


def test_a_gradient_that_is_not_finite_ends_the_run_before_anything_is_saved(
    ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"the gradient norm is (nan|inf) at iteration \d+, samples \d+\.\.\d+"):
        ranks.run(job, flags(byte_pair, f"--save {run} --lr 1e30 --init-method-std 1e10"), world=2)
    assert not (run / "latest").exists()


def test_exit_duration_ends_the_run_with_a_checkpoint_on_all_ranks(
    ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks.run(job, flags(byte_pair, f"--save {run} --exit-duration-in-mins 1e-9"), world=2)
    assert json.loads((run / "iter_0000001" / "checkpoint.json").read_text())["iteration"] == 1


def _job_that_gets_a_signal(argv: list[str]) -> None:
    """One rank of the run gets SIGUSR1 before it starts, as from a scheduler; the others do not."""
    notice = Notice([signal.SIGUSR1])
    if dist.get_rank() == dist.get_world_size() - 1:
        with notice.deferred():
            signal.raise_signal(signal.SIGUSR1)
    job(argv, notice)


def test_a_signal_to_one_rank_ends_the_run_with_a_checkpoint_on_all(
    ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks.run(_job_that_gets_a_signal, flags(byte_pair, f"--save {run}"), world=2)
    assert (run / "latest").read_text() == "iter_0000001\n"


def test_eval_noise_changes_the_evaluation_and_is_itself_reproducible(
    whole_run: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    losses = []
    for name in ("a", "b"):
        more = f"--load {whole_run} --skip-train --eval-noise --save {tmp_path / name}"
        ranks.run(job, flags(byte_pair, more), world=1)
        losses.append(metrics(tmp_path / name)[-1]["exit_losses"])
    quiet = metrics(whole_run)[-1]["exit_losses"]
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(quiet[0], rel=1e-6) and losses[0][-1] != quiet[-1]
