"""The exported model, the second copy of ours, computes what ours does: at every exit, cached, padded, compiled."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from megatron_rgpt.hf.cache_recurrent_gpt import RecurrentCache
from megatron_rgpt.hf.configuration_recurrent_gpt import KV_SHARING, RecurrentGPTConfig
from megatron_rgpt.hf.in_memory import transformers_model
from megatron_rgpt.hf.modeling_recurrent_gpt import CACHE_FIELD, RecurrentGPTForCausalLM
from tests.hf.models import CONTEXT, KEEP, ByHand, exported, lively_model, some_tokens
from tests.model.models import VOCABULARY

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def in_pieces(
    model: RecurrentGPTForCausalLM, tokens: torch.Tensor, cache: RecurrentCache, pieces: list[int], **options
) -> torch.Tensor:
    """Logits of all tokens, given in pieces of these lengths, one after the other."""
    parts = tokens.split(pieces, dim=1)
    return torch.cat([model(part, past_key_values=cache, **options).logits for part in parts], dim=1)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("1+2x3+1", {}),
        ("0+1x4+0", {"anchor": False, "gate": False}),
        ("2+1x2+0", {"gelu": "tanh", "gate_temperature": 0.5}),
        ("1+1x3+2", {"anchor": False}),
        ("1+1x3+1", {"gate": False, "norm_epsilon": 1e-3}),
    ],
)
def test_logits_equal_ours_at_every_exit(layout: str, changes: dict) -> None:
    ours = lively_model(layout, **changes)
    theirs = transformers_model(ours)
    exits = list(range(ours.default_depth + 3))
    for k, expected in zip(exits, ours(some_tokens(), exits=exits), strict=True):
        for use_cache in (False, True):
            logits = theirs(some_tokens(), num_recurrences=k, use_cache=use_cache).logits
            torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(theirs(some_tokens()).logits, ours(some_tokens()), **CLOSE)


def test_evaluation_has_noise_only_where_the_run_asked_for_it() -> None:
    quiet, noisy, tokens = exported(), exported(eval_noise=True), some_tokens()
    assert torch.equal(quiet(tokens).logits, quiet(tokens).logits)
    assert not torch.equal(noisy(tokens).logits, noisy(tokens).logits)
    torch.testing.assert_close(
        noisy(tokens, num_recurrences=0).logits, quiet(tokens, num_recurrences=0).logits, **CLOSE
    )


def test_the_loss_is_that_of_the_shifted_labels() -> None:
    ours, tokens = lively_model(), some_tokens()
    loss = transformers_model(ours)(tokens, labels=tokens).loss
    torch.testing.assert_close(loss.double(), ours(tokens[:, :-1], tokens[:, 1:]), rtol=1e-5, atol=1e-5)


def test_a_model_trains_through_transformers() -> None:
    model, tokens = exported().requires_grad_(True), some_tokens()
    with torch.enable_grad():
        output = model(tokens, labels=tokens)
        output.loss.backward()
    assert getattr(output, CACHE_FIELD) is None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_a_new_model_starts_as_ours_does() -> None:
    config = RecurrentGPTConfig(
        vocab_size=999, hidden_size=64, num_attention_heads=4, n_prelude=1, n_core=2, n_coda=1, num_recurrences=3
    )
    model = RecurrentGPTForCausalLM(config)
    assert torch.equal(model.model.rule.gate.out.bias, torch.full((64,), 4.0))
    assert model.model.rule.projection.state.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # 8 block executions
    assert model.model.core[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("slots", [None, 24], ids=["growing", "static"])
@pytest.mark.parametrize("pieces", [[13], [5, 1, 1, 6], [1] * 13])
def test_cached_equals_uncached_with_full_caches(slots: int | None, pieces: list[int]) -> None:
    model, tokens = exported(), some_tokens()
    cache = RecurrentCache(model.config, max_cache_len=slots)
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(in_pieces(model, tokens, cache, pieces), expected, **CLOSE)
    assert int(cache.get_seq_length()) == 13


def test_a_growing_cache_outgrows_its_first_room() -> None:
    model, tokens = exported(seq_length=200), some_tokens(length=150)
    cache = RecurrentCache(model.config)
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(in_pieces(model, tokens, cache, [60] + [1] * 90), expected, **CLOSE)


@pytest.mark.parametrize("strategy", KEEP)
@pytest.mark.parametrize("slots", [None, 24], ids=["growing", "static"])
def test_a_shared_cache_keeps_what_its_strategy_says(strategy: str, slots: int | None) -> None:
    model, tokens = exported(), some_tokens(samples=1)
    pieces = [5, 1, 1, 3, 1, 1, 1]
    by_hand = ByHand(model, strategy)
    expected = torch.cat([by_hand.run(part[0], depth=4) for part in tokens.split(pieces, dim=1)])
    cache = RecurrentCache(model.config, num_recurrences=4, kv_sharing=strategy, max_cache_len=slots)
    logits = in_pieces(model, tokens, cache, pieces, num_recurrences=4)[0]
    torch.testing.assert_close(logits, expected, **CLOSE)
    # and not by chance what `full` computes
    assert not torch.allclose(logits[6:], model(tokens, num_recurrences=4).logits[0, 6:], atol=1e-3)


@pytest.mark.parametrize("kv_sharing", KV_SHARING)
def test_a_left_padded_batch_generates_what_each_prompt_does_alone(kv_sharing: str) -> None:
    model, tokens, padding = exported(), some_tokens(), [0, 4, 9]
    mask = torch.ones_like(tokens)
    for row, pads in zip(mask, padding, strict=True):
        row[:pads] = 0
    options = {"kv_sharing": kv_sharing, "num_recurrences": 4, **GREEDY}
    together = model.generate(tokens * mask, attention_mask=mask, **options)[:, 13:]
    static = model.generate(tokens * mask, attention_mask=mask, cache_implementation="static", **options)[:, 13:]
    for i, pads in enumerate(padding):
        alone = model.generate(tokens[i : i + 1, pads:], **options)[:, 13 - pads :]
        assert torch.equal(together[i : i + 1], alone)
    assert torch.equal(static, together)


def test_padding_is_no_part_of_a_prompt_in_forward() -> None:
    model, tokens = exported(), some_tokens(samples=1)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], dim=1)
    mask = (padded > 0).long()
    logits = model(padded, attention_mask=mask).logits[:, 5:]
    torch.testing.assert_close(logits, model(tokens).logits, **CLOSE)


def test_generation_with_a_cache_is_generation_without_one() -> None:
    model, tokens = exported(), some_tokens()
    for more in ({}, {"num_beams": 3}, {"num_recurrences": 1}, {"num_recurrences": 0}):
        options = {**GREEDY, **more}
        assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))


@pytest.mark.parametrize("kv_sharing", KV_SHARING)
def test_decoding_with_a_static_cache_compiles_once_and_whole(kv_sharing: str) -> None:
    model, tokens = exported(), some_tokens()
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    for _ in range(2):
        caches = [RecurrentCache(model.config, kv_sharing=kv_sharing, max_cache_len=24) for _ in range(2)]
        for cache in caches:
            model(tokens[:, :5], past_key_values=cache)
        for i in range(5, 13):
            token = tokens[:, i : i + 1].clone()
            plain, whole = model(token, past_key_values=caches[0]), compiled(token, past_key_values=caches[1])
            torch.testing.assert_close(whole.logits, plain.logits, **CLOSE)
    assert counter.frame_count == 1


def test_bytes_of_a_static_cache_are_those_of_its_strategy() -> None:
    def size(kv_sharing: str) -> int:
        model = exported("1+2x5+1")
        cache = RecurrentCache(model.config, kv_sharing=kv_sharing, max_cache_len=CONTEXT)
        model(some_tokens(), past_key_values=cache)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    block = 2 * 3 * 4 * CONTEXT * 8 * 8
    assert size("full") == (1 + 2 * 5 + 1) * block
    assert {size(kind) for kind in KEEP} == {(1 + 2 + 1) * block}


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made under it that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.live = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self.hold(tensor)
        return out

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self.holders[place] = self.holders.get(place, 0) + 1
        if self.holders[place] == 1:
            self.live += size
            self.most = max(self.most, self.live)
        weakref.finalize(tensor, self.release, place, size)

    def release(self, place: int, size: int) -> None:
        self.holders[place] -= 1
        if self.holders[place] == 0:
            self.live -= size


@pytest.mark.parametrize("kv_sharing", KV_SHARING)
def test_a_prefill_holds_no_more_with_more_recurrences_unless_all_are_kept(kv_sharing: str) -> None:
    def most(depth: int) -> int:
        model, tokens = exported(), some_tokens(length=39)
        cache = RecurrentCache(model.config, num_recurrences=depth, kv_sharing=kv_sharing, max_cache_len=CONTEXT)
        with LiveBytes() as memory:
            model(tokens, past_key_values=cache, num_recurrences=depth)
        return memory.most

    step = 2 * 2 * 3 * CONTEXT * 32 * 8  # keys and values of two blocks
    grown = most(9) - most(3)
    assert grown == pytest.approx(6 * step, rel=0.02) if kv_sharing == "full" else grown < 0.1 * step


def test_a_cache_may_be_cropped_and_filled_again() -> None:
    model, tokens = exported(), some_tokens()
    cache = RecurrentCache(model.config)
    in_pieces(model, tokens, cache, [8, 1, 1, 1, 2])
    cache.crop(-5)
    expected = model(tokens, use_cache=False).logits[:, 8:]
    torch.testing.assert_close(in_pieces(model, tokens[:, 8:], cache, [2, 3]), expected, **CLOSE)


def test_what_cannot_be_said_is_said() -> None:
    model, tokens = exported(), some_tokens()
    cache = RecurrentCache(model.config, num_recurrences=2)
    model(tokens, past_key_values=cache, num_recurrences=2)
    with pytest.raises(ValueError, match="num_recurrences 2, kv_sharing full; this call asks for 3"):
        model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="kv_sharing 'middle': one of full, last, first, average"):
        model(tokens, kv_sharing="middle")
    with pytest.raises(ValueError, match="num_recurrences -1"):
        model(tokens, num_recurrences=-1)
    with pytest.raises(ValueError, match=f"position {CONTEXT} is beyond max_position_embeddings {CONTEXT}"):
        model(some_tokens(length=CONTEXT + 1))
    filled = DynamicCache()
    filled.update(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), 0)
    with pytest.raises(ValueError, match="a filled DynamicCache cannot be read: use RecurrentCache"):
        model(tokens, past_key_values=filled)


def test_the_configuration_survives_its_file(tmp_path: Path) -> None:
    config = exported("1+2x3+1", gate_temperature=0.5).config
    config.save_pretrained(tmp_path)
    again = RecurrentGPTConfig.from_pretrained(tmp_path)
    assert (again.n_core, again.num_recurrences, again.gate_temperature) == (2, 3, 0.5)
    assert again.vocab_size == VOCABULARY and again.model_type == "recurrent_gpt"
