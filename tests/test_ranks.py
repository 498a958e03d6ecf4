"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import signal

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool


def whoami() -> tuple[int, int, str, str]:
    return dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], dist.get_backend()


def sum_of_ranks(scale: float) -> torch.Tensor:
    tensor = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_on(rank: int, error: Exception | None) -> None:
    if dist.get_rank() == rank:
        raise error or Unpicklable(1, 2)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        signal.pause()


def set_global(name: str) -> bool:
    seen = hasattr(torch, name)
    setattr(torch, name, True)
    return seen


def train_one_step(zero_stage: int) -> tuple[float, list[float]]:
    """Loss and summed weights after one step on a batch of 4 that the ranks share."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.arange(24.0).reshape(4, 6) / 24
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = engine(mine).square().mean()
    engine.backward(loss)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=zero_stage == 3):
        weights = [parameter.detach().sum().item() for parameter in model.parameters()]
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size(), weights


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_run_has_a_gloo_group_of_the_asked_size(ranks: RankPool, world: int) -> None:
    assert ranks.run(whoami, world=world) == [(rank, world, str(rank), "gloo") for rank in range(world)]


def test_results_come_back_by_rank_and_tensors_by_value(ranks: RankPool) -> None:
    results = ranks.run(sum_of_ranks, 2.0, world=2)
    assert [result.tolist() for result in results] == [[6.0] * 3] * 2


def test_an_exception_keeps_its_type_and_names_its_rank(ranks: RankPool) -> None:
    with pytest.raises(KeyError, match="lost key") as caught:
        ranks.run(fail_on, 1, KeyError("lost key"), world=2)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_pickled_still_shows_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2.*Unpicklable: 1 and 2"):
        ranks.run(fail_on, 0, None, world=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_does_not_hang_the_others(ranks: RankPool, rank: int) -> None:
    with pytest.raises(RankError, match=rf"rank {rank} of 2 was killed by SIGKILL"):
        ranks.run(die_on, rank, world=2)
    assert len(ranks.run(whoami, world=2)) == 2


def test_a_hanging_rank_is_named_when_the_time_is_over(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"no result after 3 s from rank 1$"):
        ranks.run(hang_on, 1, world=2, timeout_seconds=3)


def test_outcomes_tell_how_each_rank_ended_and_end_nobody(ranks: RankPool) -> None:
    killed, waited = ranks.outcomes(die_on, 0, world=2)
    assert isinstance(killed, RankError) and "rank 0 of 2 was killed by SIGKILL" in str(killed)
    # it fails by itself, on the connection that was cut
    assert isinstance(waited, RankError) and "rank 1 of 2 raised:" in str(waited)
    whole = ranks.outcomes(whoami, world=2)
    assert whole == ranks.run(whoami, world=2)


def test_a_run_leaves_nothing_behind_for_the_next(ranks: RankPool) -> None:
    assert ranks.run(set_global, "_left_behind", world=2) == [False, False]
    assert ranks.run(set_global, "_left_behind", world=2) == [False, False]


def test_more_ranks_than_the_pool_has_are_refused() -> None:
    with RankPool(size=2) as pool, pytest.raises(ValueError, match="world=3"):
        pool.run(whoami, world=3)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_deepspeed_trains_in_it_and_two_ranks_agree_with_one(ranks: RankPool, zero_stage: int) -> None:
    (loss, weights), *_ = ranks.run(train_one_step, zero_stage, world=1)
    for other_loss, other_weights in ranks.run(train_one_step, zero_stage, world=2):
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_weights == pytest.approx(weights, rel=1e-6)
