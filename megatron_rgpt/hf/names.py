"""Which tensor of a Hugging Face folder is which parameter of ours.

A recurrent model is exported under our canonical names; a dense one under those of `GPT2LMHeadModel`, whose linear
layers hold their matrices the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_rgpt.model.recurrent import RecurrentTransformer

_EMBEDDINGS = {"embedding.tokens": "wte", "embedding.positions": "wpe"}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder; `transposed` against ours."""

    name: str
    transposed: bool = False

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """From ours to theirs, or back."""
        return tensor.t().contiguous() if self.transposed else tensor.contiguous()


def hf_tensors(names: Iterable[str], *, dense: bool) -> dict[str, HFTensor]:
    """The Hugging Face tensor of each of our parameters, by canonical name."""
    return {name: _gpt2(name) if dense else _recurrent(name) for name in names}


def _recurrent(name: str) -> HFTensor:
    if name in _EMBEDDINGS:
        return HFTensor(f"model.{name}.weight")
    return HFTensor(f"model.{name.removeprefix('head.')}")


def _gpt2(name: str) -> HFTensor:
    if name in _EMBEDDINGS:
        return HFTensor(f"transformer.{_EMBEDDINGS[name]}.weight")
    layer, _, kind = name.rpartition(".")
    if layer == "head.norm":
        return HFTensor(f"transformer.ln_f.{kind}")
    prelude, number, layer = layer.split(".", 2)
    assert prelude == "prelude", name
    transposed = kind == "weight" and not layer.endswith("norm")
    return HFTensor(f"transformer.h.{number}.{_GPT2_BLOCK[layer]}.{kind}", transposed)


def logical_parameters(model: RecurrentTransformer) -> dict[str, torch.Tensor]:
    """The parameters of a whole model by canonical name, without the padding of its vocabulary."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {"embedding.tokens": parameters["embedding.tokens"][: model.vocab_size]}
