"""Update rules of the looped core, one file each."""

from megatron_rgpt.config import ModelConfig
from megatron_rgpt.model.recurrence.interface import StepContext, UpdateRule
from megatron_rgpt.model.recurrence.recurrentgpt import RecurrentGPT

__all__ = ["RecurrentGPT", "StepContext", "UpdateRule", "build_rule"]


def build_rule(config: ModelConfig) -> UpdateRule:
    """The update rule of a looped model: the one place where another rule would be chosen."""
    return RecurrentGPT(config)
