"""What the end-of-document token does to positions and to the loss, in any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rgpt.model.head import mean_loss
from megatron_rgpt.training.feed import Documents, micro_batches
from tests.jobs import flags, job, metrics
from tests.model.models import small_model
from tests.ranks import RankPool

EOD = 9
TOKENS = np.array([[1, 2, EOD, 4, 5, EOD, 7], [EOD, 2, 3, 4, 5, 6, 7]])


def one_batch(**documents: bool):
    samples = iter([(np.array([0, 1]), TOKENS)])
    return next(micro_batches(samples, None, torch.device("cpu"), Documents(EOD, **documents)))


def test_positions_restart_behind_each_end_of_document() -> None:
    batch = one_batch(reset_positions=True, mask_loss=False)
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]]
    model = small_model(double=True)
    logits = model(batch.tokens_BS, positions_BS=batch.positions_BS)
    with torch.no_grad():
        model.embedding.positions[3:] = 0.0
    reset = model(batch.tokens_BS, positions_BS=batch.positions_BS)
    assert torch.equal(reset[0], logits[0]) and not torch.equal(reset[1], logits[1])


def test_tokens_that_end_a_document_count_no_loss() -> None:
    batch = one_batch(reset_positions=False, mask_loss=True)
    assert batch.weights_BS.tolist() == [[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1]]
    losses = torch.arange(12.0).view(2, 6)
    expected = losses[batch.tokens_BS != EOD].mean()
    assert mean_loss(losses, batch.weights_BS * 12 / 9) == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("--micro-batch-size 1", 2),
        ("--tensor-model-parallel-size 2 --micro-batch-size 1", 2),
        ("--pipeline-model-parallel-size 2", 4),
    ],
)
def test_masked_losses_and_restarted_positions_are_the_same_in_any_layout(
    ranks: RankPool, byte_pair: str, tmp_path: Path, layout: str, world: int
) -> None:
    # sequences long enough to meet the ends of documents are rare in real text: take the token of a space instead
    more = "--eod-mask-loss --reset-position-ids --train-iters 3 --eval-interval 3"
    ranks.run(_job_with_spaces_as_ends, flags(byte_pair, f"{more} --save {tmp_path / 'one'}"), world=1)
    ranks.run(_job_with_spaces_as_ends, flags(byte_pair, f"{more} {layout} --save {tmp_path / 'many'}"), world=world)
    ranks.run(job, flags(byte_pair, f"--train-iters 3 --eval-interval 3 --save {tmp_path / 'plain'}"), world=1)
    one, many, plain = (metrics(tmp_path / name) for name in ("one", "many", "plain"))
    for ours, theirs in zip(many, one, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5), name
    assert one[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-4)


def _job_with_spaces_as_ends(argv: list[str]) -> None:
    """The main job with a tokenizer whose documents end at each space; this process is a fork of its own."""
    from megatron_rgpt.data.tokenizers.byte import ByteTokenizer

    ByteTokenizer.eod = ord(" ")
    job(argv)
