"""The recurrent model against the paper's equations, written out here a second time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rgpt.model.recurrent import RecurrentTransformer, build_model
from megatron_rgpt.randomness import Noise
from tests.model.models import VOCABULARY, small_config, small_model, tokens_BS

NOISE = Noise(seed=3, ordinals=(10, 11, 12))


def listing(model: RecurrentTransformer, tokens: torch.Tensor, depth: int, noise: Noise | None = None) -> torch.Tensor:
    """Logits by the paper's Listing A.1 and Eq. 2-5, on the model's weights: concatenations, nothing hoisted."""
    config, rule = model.config, model.rule
    h = F.embedding(tokens.t(), model.embedding.tokens) + model.embedding.positions[: tokens.shape[1], None]
    for block in model.prelude:
        h = block(h)
    h_pre = h
    for step in range(1, depth + 1):
        noisy = h
        if noise is not None:
            noisy = h + config.state_noise_std * noise.draw_sBD("state_noise", step, h)
        o = noisy
        if config.anchor:
            w_proj = torch.cat([rule.projection.state.weight, rule.projection.anchor.weight], dim=1)
            o = torch.cat([noisy, h_pre], dim=-1) @ w_proj.t()
        for block in model.core:
            o = block(o)
        if not config.gate:
            h = o
            continue
        gate = rule.gate
        first = torch.cat([gate.state.weight, gate.anchor.weight], dim=1)
        both = torch.cat([gate.state_norm(h), gate.anchor_norm(h_pre)], dim=-1)
        logit = F.silu(both @ first.t() + gate.anchor.bias) @ gate.out.weight.t() + gate.out.bias
        logit = logit / config.gate_temperature
        if noise is not None:
            logit = logit + config.gate_noise_std * noise.draw_sBD("gate_noise", step, h)
        g = torch.sigmoid(logit)
        h = g * h + (1 - g) * o
    for block in model.coda:
        h = block(h)
    return (model.head.norm(h) @ model.embedding.tokens[:VOCABULARY].t()).transpose(0, 1)


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("noise", [None, NOISE], ids=["quiet", "noisy"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logits_equal_the_papers_listing_at_any_depth(depth: int, noise: Noise | None, temperature: float) -> None:
    model = small_model(double=True, gate_temperature=temperature)
    logits = model(tokens_BS(), depth=depth, noise=noise)
    torch.testing.assert_close(logits, listing(model, tokens_BS(), depth, noise), rtol=1e-10, atol=1e-12)


LADDER = {
    "recurrence alone": ("0+1x4+0", {"anchor": False, "gate": False, "state_noise_std": 0.0}),
    "prelude and coda": ("1+1x3+1", {"anchor": False, "gate": False, "state_noise_std": 0.0}),
    "state noise": ("1+1x3+1", {"anchor": False, "gate": False}),
    "re-injection": ("1+1x3+1", {"gate": False}),
    "gate": ("1+1x3+1", {}),
}


@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_of_the_ablation_ladder_is_its_formula(rung: str) -> None:
    layout, switches = LADDER[rung]
    model = small_model(layout, double=True, **switches)
    depth = model.default_depth
    expected = listing(model, tokens_BS(), depth, NOISE)
    torch.testing.assert_close(model(tokens_BS(), noise=NOISE), expected, rtol=1e-10, atol=1e-12)


def test_hoisted_anchor_terms_change_nothing_in_fp64() -> None:
    hoisted, unhoisted = (small_model(double=True, hoist_anchor=hoist) for hoist in (True, False))
    results = []
    for model in (hoisted, unhoisted):
        loss = model(tokens_BS(), tokens_BS(), noise=NOISE)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_a_gate_forced_to_1_leaves_the_preludes_output_to_the_coda() -> None:
    model = small_model()
    assert torch.equal(model(tokens_BS(), gate_override=1.0), model(tokens_BS(), depth=0))


def test_a_gate_forced_to_0_writes_every_proposal() -> None:
    model = small_model()
    without_gate = small_model(gate=False)
    without_gate.load_state_dict(model.state_dict(), strict=False)
    forced = model(tokens_BS(), gate_override=0.0)
    assert torch.equal(forced, without_gate(tokens_BS()))
    assert not torch.allclose(forced, model(tokens_BS(), depth=0))


def test_every_exit_equals_a_model_truncated_by_hand() -> None:
    model = small_model()
    exits = [0, 1, 2, 3, 5]
    losses = model(tokens_BS(), tokens_BS(), exits=exits)
    for k, loss in zip(exits, losses, strict=True):
        truncated = small_model(f"1+2x{max(k, 1)}+1")
        truncated.load_state_dict(model.state_dict())
        assert torch.equal(loss, truncated(tokens_BS(), tokens_BS(), depth=k)), k


def test_noise_is_off_unless_it_is_given() -> None:
    model = small_model()
    assert torch.equal(model(tokens_BS()), model(tokens_BS()))
    assert not torch.equal(model(tokens_BS()), model(tokens_BS(), noise=NOISE))


def test_the_gate_starts_at_a_copy_of_98_percent() -> None:
    model, _ = build_model(small_config(gate_bias=4.0), VOCABULARY, seed=1)
    assert torch.equal(model.rule.gate.out.bias, torch.full((32,), 4.0))
    state = torch.randn(13, 3, 32, generator=torch.Generator().manual_seed(1))
    write = model.rule.gate(state, model.rule.gate.anchor_term(state), None)
    assert 1 - write.mean().item() == pytest.approx(torch.sigmoid(torch.tensor(4.0)).item(), abs=1e-3)


def test_an_almost_closed_gate_still_passes_gradients_in_bf16() -> None:
    model = small_model(gate_bias=8.0).bfloat16()
    model(tokens_BS(), tokens_BS()).backward()
    exact = small_model(gate_bias=8.0)
    exact(tokens_BS(), tokens_BS()).backward()
    for name in ("core.0.mlp.down.weight", "rule.gate.out.bias"):
        ours, theirs = (m.get_parameter(name).grad.float() for m in (model, exact))
        assert ours.norm() == pytest.approx(theirs.norm().item(), rel=0.1), name


def test_a_sample_gets_the_same_noise_in_any_micro_batch() -> None:
    model = small_model(double=True)
    together = model(tokens_BS(), noise=NOISE)
    alone = [model(tokens_BS()[i : i + 1], noise=Noise(3, (10 + i,))) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-12)


def test_recomputation_gives_the_same_gradients_to_the_last_bit_in_fp32() -> None:
    gradients = []
    for recompute in (False, True):
        model, _ = build_model(small_config(), VOCABULARY, seed=1, recompute=recompute)
        model(tokens_BS(), tokens_BS(), noise=NOISE).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_recomputation_keeps_one_state_per_recurrence() -> None:
    def kept_bytes(depth: int, recompute: bool) -> int:
        model, _ = build_model(small_config(), VOCABULARY, seed=1, recompute=recompute)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        # checkpointing keeps its inputs itself: count them through the states it is given
        original = RecurrentTransformer._recur

        def watched(self, state, anchor, context):
            if recompute:
                pack(state)
            return original(self, state, anchor, context)

        model._recur = watched.__get__(model)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens_BS(), tokens_BS(), depth=depth, noise=NOISE)
        del loss
        return sum(kept.values())

    state = 13 * 3 * 32 * 4
    assert kept_bytes(7, recompute=True) - kept_bytes(3, recompute=True) == 4 * state
    assert kept_bytes(7, recompute=False) - kept_bytes(3, recompute=False) > 4 * 10 * state


def test_training_at_depth_0_reduces_zeros_for_the_loop() -> None:
    model = small_model()
    model(tokens_BS(), tokens_BS(), depth=0, noise=NOISE).backward()
    loop = [*model.core.parameters(), *model.rule.parameters()]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in loop)
    assert all(parameter.grad.any() for parameter in model.coda.parameters())


def test_the_core_is_stored_once_whatever_r() -> None:
    shallow, deep = small_model("1+2x1+1"), small_model("1+2x9+1")
    assert [p.shape for p in shallow.parameters()] == [p.shape for p in deep.parameters()]
    assert len({p.data_ptr() for p in deep.core.parameters()}) == 2 * 12
