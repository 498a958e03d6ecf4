"""The dense twin against an implementation that is not ours: transformers' GPT-2."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.model.models import VOCABULARY, small_model, tokens_BS


@pytest.mark.parametrize(("gelu", "activation"), [("exact", "gelu"), ("tanh", "gelu_new")])
def test_a_dense_model_equals_transformers_gpt2_with_the_same_weights(gelu: str, activation: str) -> None:
    ours = small_model("3", gelu=gelu, double=True)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=13,
        n_embd=32,
        n_layer=3,
        n_head=4,
        activation_function=activation,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    theirs = GPT2LMHeadModel(config).double()
    state = {
        "transformer.wte.weight": ours.embedding.tokens[:VOCABULARY],
        "transformer.wpe.weight": ours.embedding.positions,
        "transformer.ln_f.weight": ours.head.norm.weight,
        "transformer.ln_f.bias": ours.head.norm.bias,
        "lm_head.weight": ours.embedding.tokens[:VOCABULARY],
    }
    names = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for number, block in enumerate(ours.prelude):
        for our_name, their_name in names.items():
            layer = block.get_submodule(our_name)
            # GPT-2's Conv1D holds its matrix the other way round
            weight = layer.weight.t() if layer.weight.dim() == 2 else layer.weight
            state[f"transformer.h.{number}.{their_name}.weight"] = weight
            state[f"transformer.h.{number}.{their_name}.bias"] = layer.bias
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and not [name for name in missing if not name.endswith((".attn.bias", ".masked_bias"))]

    tokens = tokens_BS()
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-9, atol=1e-11)
    our_loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(our_loss, theirs(tokens, labels=tokens).loss.double(), rtol=1e-6, atol=1e-6)


def test_a_prefix_of_a_text_gets_the_same_logits_as_within_the_text() -> None:
    model = small_model(double=True)
    whole = model(tokens_BS())
    torch.testing.assert_close(model(tokens_BS()[:, :6]), whole[:, :6], rtol=1e-9, atol=1e-11)
