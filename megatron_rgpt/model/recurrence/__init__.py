"""Update rules of the looped core, one file each."""

from megatron_rgpt.model.recurrence.interface import StepContext, UpdateRule
from megatron_rgpt.model.recurrence.recurrentgpt import RecurrentGPT

__all__ = ["RecurrentGPT", "StepContext", "UpdateRule"]
