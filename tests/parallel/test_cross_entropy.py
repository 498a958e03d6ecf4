"""The loss over a sharded vocabulary equals torch's over the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rgpt.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_rgpt.parallel.mesh import ALONE, Mesh, MeshShape
from tests.ranks import RankPool

S, B, V, COLUMNS = 5, 2, 300, 512


def _logits(scale: float) -> torch.Tensor:
    """Logits of the padded vocabulary; garbage in the padding, which must not count."""
    return scale * torch.randn(S, B, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _labels() -> torch.Tensor:
    """A label on every shard that has one, at both of its ends."""
    return torch.tensor([[0, 127], [128, 255], [256, 299], [5, 130], [299, 0]])


def _loss_and_gradient(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    tp = Mesh.build(MeshShape.of(dist.get_world_size(), tensor=dist.get_world_size())).tensor
    logits = _logits(scale).chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, _labels(), V, tp)
    (losses * torch.arange(1.0, 1 + S * B).view(S, B)).sum().backward()
    return losses.detach(), logits.grad


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small logits", "large logits"])
def test_loss_and_gradient_equal_torchs_with_labels_on_any_shard(ranks: RankPool, world: int, scale: float) -> None:
    logits = _logits(scale)[..., :V].clone().requires_grad_()
    losses = F.cross_entropy(logits.view(S * B, V), _labels().flatten(), reduction="none").view(S, B)
    (losses * torch.arange(1.0, 1 + S * B).view(S, B)).sum().backward()
    results = ranks.run(_loss_and_gradient, scale, world=world)
    for ours, _ in results:
        torch.testing.assert_close(ours, losses.detach(), rtol=1e-10, atol=1e-12)
    gradient = torch.cat([part for _, part in results], dim=-1)
    torch.testing.assert_close(gradient[..., :V], logits.grad, rtol=1e-10, atol=1e-12)
    assert not gradient[..., V:].any()


def test_low_precision_logits_give_an_fp32_loss() -> None:
    logits = _logits(1.0).bfloat16()
    losses = vocab_parallel_cross_entropy(logits, _labels(), V, ALONE)
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits.float()[..., :V].reshape(-1, V), _labels().flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
