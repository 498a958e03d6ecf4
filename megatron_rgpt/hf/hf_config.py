"""The model's configuration as `config.json`, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rgpt.config import Layout, ModelConfig
from megatron_rgpt.errors import UserError

CONFIG = "config.json"
_ACTIVATION = {"exact": "gelu", "tanh": "gelu_new"}
_GELU = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def to_hf(
    config: ModelConfig, vocab_size: int, *, eod: int | None, dtype: str, kv_sharing: str = "full"
) -> dict[str, Any]:
    """The content of `config.json`. `eod` begins, ends and pads texts, as GPT-2's does."""
    common = {
        "vocab_size": vocab_size,
        "dtype": dtype,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": eod,
        "activation_function": _ACTIVATION[config.gelu],
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": True,
    }
    if config.layout.is_dense:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "n_positions": config.seq_length,
            "n_embd": config.hidden_size,
            "n_layer": config.layout.prelude,
            "n_head": config.num_attention_heads,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    return {
        "architectures": ["RecurrentGPTForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_recurrent_gpt.RecurrentGPTConfig",
            "AutoModelForCausalLM": "modeling_recurrent_gpt.RecurrentGPTForCausalLM",
        },
        "model_type": "recurrent_gpt",
        **common,
        "max_position_embeddings": config.seq_length,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "n_prelude": config.layout.prelude,
        "n_core": config.layout.core,
        "n_coda": config.layout.coda,
        "num_recurrences": config.layout.recurrences,
        "anchor": config.anchor,
        "gate": config.gate,
        "gate_bias": config.gate_bias,
        "gate_temperature": config.gate_temperature,
        "eval_noise": config.eval_noise,
        "state_noise_std": config.state_noise_std,
        "gate_noise_std": config.gate_noise_std,
        "kv_sharing": kv_sharing,
    }


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder. Raises `UserError` if there is none, or it is no JSON object."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give a Hugging Face model's folder") from None
    except ValueError as error:
        raise UserError(f"{path}: broken JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def from_hf(folder: Path, content: dict[str, Any]) -> tuple[ModelConfig, int]:
    """Our configuration and the vocabulary of a recurrent or a GPT-2 folder.

    Raises `UserError` for another architecture, or a variant of GPT-2 that is not our dense model.
    """
    kind = content.get("model_type")
    if kind not in ("recurrent_gpt", "gpt2"):
        raise UserError(f"{folder / CONFIG}: model_type {kind!r} cannot be imported: only recurrent_gpt and gpt2")
    try:
        return (_recurrent if kind == "recurrent_gpt" else _gpt2)(content, folder / CONFIG)
    except KeyError as error:
        raise UserError(f"{folder / CONFIG}: lacks {error}") from None
    except TypeError as error:
        raise UserError(f"{folder / CONFIG}: a value of the wrong type ({error})") from None


def _recurrent(content: dict[str, Any], path: Path) -> tuple[ModelConfig, int]:
    _check_activation(content["activation_function"], path)
    layout = Layout(*(content[f] for f in ("n_prelude", "n_core", "num_recurrences", "n_coda")))
    same = {f: content[f] for f in ("hidden_size", "num_attention_heads", "anchor", "gate", "gate_bias")}
    same |= {f: content[f] for f in ("gate_temperature", "eval_noise", "state_noise_std", "gate_noise_std")}
    config = ModelConfig(
        layout=layout,
        seq_length=content["max_position_embeddings"],
        gelu=_GELU[content["activation_function"]],
        init_method_std=content["initializer_range"],
        norm_epsilon=content["layer_norm_epsilon"],
        **same,
    )
    return config, content["vocab_size"]


def _gpt2(content: dict[str, Any], path: Path) -> tuple[ModelConfig, int]:
    _check_activation(content.get("activation_function", "gelu_new"), path)
    width = content["n_embd"]
    # what GPT-2's configuration may say, and the one value our dense model has
    for name, only, default in (
        ("n_inner", (None, 4 * width), None),
        ("scale_attn_weights", (True,), True),
        ("scale_attn_by_inverse_layer_idx", (False,), False),
        ("tie_word_embeddings", (True,), True),
        ("add_cross_attention", (False,), False),
    ):
        value = content.get(name, default)
        if value not in only:
            raise UserError(f"{path}: {name} {value} cannot be imported: our dense model has {only[-1]}")
    config = ModelConfig(
        layout=Layout(content["n_layer"]),
        hidden_size=width,
        num_attention_heads=content["n_head"],
        seq_length=content["n_positions"],
        gelu=_GELU[content.get("activation_function", "gelu_new")],
        init_method_std=content.get("initializer_range", 0.02),
        norm_epsilon=content.get("layer_norm_epsilon", 1e-5),
    )
    return config, content["vocab_size"]


def _check_activation(activation: str, path: Path) -> None:
    if activation not in _GELU:
        raise UserError(f"{path}: activation_function {activation!r} cannot be imported: one of {', '.join(_GELU)}")
