"""Adaptive exit: tokens leave when they stand still, what left is not computed, and prefill and decoding agree."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_rgpt.hf.cache_recurrent_gpt import RecurrentCache
from tests.hf.models import exported, some_tokens

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
MOST = 8


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def states(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """h^(0)..h^(MOST) of all tokens at full depth."""
    seen = []
    original = model.model.recur

    def watched(h, *arguments):
        after = original(h, *arguments)
        seen.extend([h, after] if not seen else [after])
        return after

    model.model.recur = watched
    model(tokens, num_recurrences=MOST, use_cache=False)
    del model.model.recur
    return seen


def test_the_first_token_leaves_after_the_first_step_that_changes_it_less_than_the_threshold() -> None:
    # the first token sees itself alone, so that nothing else's exit changes its states
    model, tokens = exported(), some_tokens(samples=20, length=1)
    h = states(model, tokens)
    changes = torch.stack([(b - a).norm(dim=-1) / a.norm(dim=-1) for a, b in itertools.pairwise(h)])[:, :, 0]
    threshold = changes.median().item()
    output = model(tokens, num_recurrences=MOST, exit_threshold=threshold, use_cache=False)
    for row in range(20):
        below = (changes[:, row] < threshold).nonzero()
        expected = int(below[0]) + 1 if len(below) else MOST
        assert output.recurrences[row, 0] == expected
        alone = model(tokens[row : row + 1], num_recurrences=expected).logits[0]
        torch.testing.assert_close(output.logits[row], alone, **CLOSE)
    assert len(set(output.recurrences.flatten().tolist())) > 2


def test_the_other_criterion_is_the_divergence_of_the_exits_distributions() -> None:
    model, tokens = exported(), some_tokens(samples=20, length=1)
    exits = torch.stack([model(tokens, num_recurrences=k).logits[:, 0] for k in range(MOST + 1)]).log_softmax(-1)
    divergences = (exits[1:].exp() * (exits[1:] - exits[:-1])).sum(-1)
    threshold = divergences.median().item()
    options = {"num_recurrences": MOST, "exit_threshold": threshold, "exit_criterion": "kl"}
    output = model(tokens, use_cache=False, **options)
    for row in range(20):
        below = (divergences[:, row] < threshold).nonzero()
        assert output.recurrences[row, 0] == (int(below[0]) + 1 if len(below) else MOST)


def test_thresholds_at_the_ends_give_fixed_depths() -> None:
    model, tokens = exported(), some_tokens()
    never = model(tokens, num_recurrences=MOST, exit_threshold=0.0)
    at_once = model(tokens, num_recurrences=MOST, exit_threshold=1e9)
    assert (never.recurrences == MOST).all() and (at_once.recurrences == 1).all()
    torch.testing.assert_close(never.logits, model(tokens, num_recurrences=MOST).logits, **CLOSE)
    torch.testing.assert_close(at_once.logits, model(tokens, num_recurrences=1).logits, **CLOSE)


@pytest.mark.parametrize("slots", [None, 24], ids=["growing", "static"])
def test_decoding_leaves_where_a_prefill_does_with_full_caches(slots: int | None) -> None:
    model, tokens = exported(), some_tokens()
    options = {"num_recurrences": MOST, "exit_threshold": 0.3}
    whole = model(tokens, use_cache=False, **options)
    assert len(set(whole.recurrences.flatten().tolist())) > 2
    cache = RecurrentCache(model.config, num_recurrences=MOST, max_cache_len=slots)
    parts = [model(part, past_key_values=cache, **options) for part in tokens.split([5, 1, 2, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], dim=1), whole.logits, **CLOSE)
    assert torch.equal(torch.cat([part.recurrences for part in parts], dim=1), whole.recurrences)


@pytest.mark.parametrize("criterion", ["state", "kl"])
@pytest.mark.parametrize("kv_sharing", ["full", "average"])
def test_a_left_padded_batch_leaves_where_each_prompt_does_alone(criterion: str, kv_sharing: str) -> None:
    model, tokens, pads = exported(), some_tokens(samples=2), 6
    mask = torch.ones_like(tokens)
    mask[1, :pads] = 0
    options = {
        "num_recurrences": MOST,
        "exit_threshold": 0.3 if criterion == "state" else 0.02,
        "exit_criterion": criterion,
        "kv_sharing": kv_sharing,
    }
    together = model(tokens * mask, attention_mask=mask, **options)
    alone = model(tokens[1:, pads:], **options)
    assert torch.equal(together.recurrences[1:, pads:], alone.recurrences)
    assert not together.recurrences[1, :pads].any()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    said = model.generate(tokens * mask, attention_mask=mask, **greedy)[1, 13:]
    assert torch.equal(said, model.generate(tokens[1:, pads:], **greedy)[0, 13 - pads :])


def test_work_that_is_left_out_is_not_done() -> None:
    model, tokens = exported("1+2x3+1"), some_tokens(samples=1, length=32)

    def flops(**options) -> int:
        with FlopCounterMode(display=False) as counter:
            model(tokens, use_cache=False, num_recurrences=MOST, **options)
        return counter.get_total_flops()

    def steps(threshold: float) -> int:
        output = model(tokens, use_cache=False, num_recurrences=MOST, exit_threshold=threshold)
        return int(output.recurrences.sum())

    # one step of one token: linear layers alone, attention being small against them
    D = 32
    linear = 2 * (2 * 12 + 1 + 2) * D * D
    full, half = flops(exit_threshold=0.0), flops(exit_threshold=0.3)
    saved = 32 * MOST - steps(0.3)
    assert 0.2 * 32 * MOST < saved < 0.9 * 32 * MOST
    assert full - half >= linear * saved


def test_decoding_ends_the_loop_with_the_last_row() -> None:
    model, tokens = exported(), some_tokens(samples=2)
    cache = RecurrentCache(model.config, num_recurrences=MOST)
    options = {"num_recurrences": MOST, "exit_threshold": 1e9}
    model(tokens[:, :12], past_key_values=cache, **options)
    with FlopCounterMode(display=False) as one:
        model(tokens[:, 12:], past_key_values=cache, **options)
    cache = RecurrentCache(model.config, num_recurrences=1)
    model(tokens[:, :12], past_key_values=cache, num_recurrences=1)
    with FlopCounterMode(display=False) as fixed:
        model(tokens[:, 12:], past_key_values=cache, num_recurrences=1)
    assert one.get_total_flops() == fixed.get_total_flops()
