"""The logical tensors behind a DeepSpeed engine: fp32 weights and Adam's moments, read and written by parameter.

DeepSpeed keeps them flattened and partitioned, differently at each ZeRO stage; its accessors hide most of that.
Reads are collective: every rank of the data-parallel group gets the whole tensor.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from megatron_rgpt.parallel.registry import Entry

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


class EngineTensors:
    """Access to one engine's fp32 weights and moments, in logical shapes."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._stage = engine.zero_optimization_stage()

    def read(self, entry: Entry, kind: Kind) -> torch.Tensor:
        """The whole logical fp32 tensor, on the CPU."""
        parameter = entry.parameter
        if self._stage == 0:
            held = parameter.detach() if kind == "weight" else self._engine.basic_optimizer.state[parameter][kind]
        elif kind == "weight":
            held = safe_get_full_fp32_param(parameter)
        else:
            held = safe_get_full_optimizer_state(parameter, kind)
        return entry.logical(held.view(entry.held)).float().cpu()

    def write(self, entry: Entry, kind: Kind, logical: torch.Tensor) -> None:
        """Set this rank's part of the fp32 weight or of a moment."""
        parameter = entry.parameter
        held = entry.padded(logical).to(self._engine.device)
        if self._stage == 0:
            target = parameter.data if kind == "weight" else self._engine.basic_optimizer.state[parameter][kind]
            target.copy_(held)
        elif self._stage == 3:
            part = _partition(held, parameter)
            if kind == "weight":
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, kind)
        elif kind == "weight":
            safe_set_full_fp32_param(parameter, held)
        else:
            safe_set_full_optimizer_state(parameter, held, kind)

    def steps_taken(self) -> int:
        """AdamW's step count, which its bias correction reads."""
        return max((int(state["step"]) for state in self._engine.basic_optimizer.state.values()), default=0)

    def create_moments(self, steps: int) -> None:
        """Make the zero moments that AdamW would make at its first step, as of `steps` steps taken.

        Call once, before the first step: DeepSpeed would link parameters to their moments after the step of its
        first parameter group, when those of the second do not exist yet.
        """
        optimizer = self._engine.basic_optimizer
        for parameter in self._optimized():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(steps), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _optimized(self) -> list[torch.Tensor]:
        """The tensors that torch's optimizer updates: parameters, or DeepSpeed's flat fp32 partitions."""
        if self._stage == 3:
            # stage 3 lends them to the optimizer only during a step
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._engine.basic_optimizer.param_groups for p in group["params"]]


def _partition(held: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's ZeRO-3 part of a whole tensor; the last part is padded with zeros."""
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    part = held.flatten()[start : start + size]
    return torch.cat([part, part.new_zeros(size - part.numel())])
