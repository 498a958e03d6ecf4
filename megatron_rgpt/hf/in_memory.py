"""One of our models as the transformers model that its export would be, without a folder."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from megatron_rgpt.hf.configuration_recurrent_gpt import RecurrentGPTConfig
from megatron_rgpt.hf.hf_config import to_hf
from megatron_rgpt.hf.modeling_recurrent_gpt import RecurrentGPTForCausalLM
from megatron_rgpt.hf.names import hf_tensors, logical_parameters
from megatron_rgpt.model.recurrent import RecurrentTransformer


def transformers_model(model: RecurrentTransformer) -> PreTrainedModel:
    """A `RecurrentGPTForCausalLM`, or of a dense model a `GPT2LMHeadModel`, in evaluation mode, with these weights."""
    dense = model.config.layout.is_dense
    content = to_hf(model.config, model.vocab_size, eod=None, dtype="float32")
    made = GPT2LMHeadModel(GPT2Config(**content)) if dense else RecurrentGPTForCausalLM(RecurrentGPTConfig(**content))
    made = made.to(next(model.parameters()).dtype)
    ours = logical_parameters(model)
    state = {theirs.name: theirs.convert(ours[name]) for name, theirs in hf_tensors(ours, dense=dense).items()}
    missing, unexpected = made.load_state_dict(state, strict=False)
    # the head is tied to the token embedding
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    made.tie_weights()
    return made.eval().requires_grad_(False)


def exit_logits(model: PreTrainedModel, tokens_BS: torch.Tensor, exits: list[int]) -> torch.Tensor:
    """The next token's logits at each exit, [K, B, V], fp32. A dense model has the one exit 0."""
    with torch.no_grad():
        if not isinstance(model.config, RecurrentGPTConfig):
            return model(tokens_BS, use_cache=False).logits[None, :, -1].float()
        kept = [model(tokens_BS, num_recurrences=k, use_cache=False, logits_to_keep=1).logits[:, -1] for k in exits]
    return torch.stack(kept).float()
