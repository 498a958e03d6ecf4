"""The logical tensors behind a DeepSpeed engine: master weights and Adam's moments, read and written by parameter.

DeepSpeed keeps them flattened and partitioned, differently at each ZeRO stage. Here every stage is the same: a rank
holds a contiguous fragment (perhaps none) of its slice, flattened, of each parameter. Reads are collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from megatron_rgpt.checkpoint.totals import Kind
from megatron_rgpt.parallel.registry import Entry


class EngineTensors:
    """Access to one engine's master weights and moments, in logical shapes. Make it before the first step."""

    def __init__(self, engine: DeepSpeedEngine, *, steps: int = 0) -> None:
        """Create Adam's moments, as zeros of `steps` steps taken.

        AdamW would make them in its first step, but DeepSpeed links parameters to them after the step of the first
        parameter group, when those of the second do not exist yet.
        """
        self._engine = engine
        self._stage = engine.zero_optimization_stage()
        for parameter in self._optimized():
            engine.basic_optimizer.state[parameter] = {
                "step": torch.tensor(float(steps), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        if self._stage in (1, 2):
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    def read(self, entry: Entry, kind: Kind) -> torch.Tensor:
        """The whole logical tensor on every rank, on the engine's device; fp32, or fp64 in an fp64 run.

        Where nothing is partitioned it is a view of the engine's own memory.
        """
        start, fragment = self._fragment(entry, kind)
        if self._stage == 0 or dist.get_world_size(self._engine.data_parallel_group) == 1:
            held = fragment.view(entry.held)
        else:
            flat = torch.zeros(torch.Size(entry.held).numel(), dtype=self._dtype(), device=self._engine.device)
            flat[start : start + fragment.numel()] = fragment
            dist.all_reduce(flat, group=self._engine.data_parallel_group)
            held = flat.view(entry.held)
        if not entry.sharded:
            return held[: entry.shape[0]]
        whole = entry.put(held).contiguous()
        dist.all_reduce(whole, group=entry.tp.handle)
        return whole

    def write(self, entry: Entry, kind: Kind, logical: torch.Tensor) -> None:
        """Set this rank's fragment from the whole logical tensor."""
        start, fragment = self._fragment(entry, kind)
        part = entry.take(logical).flatten()[start : start + fragment.numel()].to(fragment)
        if self._stage < 3:
            fragment.copy_(part)
            return
        # the last partition of a parameter may be longer than what is left of it
        padding = entry.parameter.ds_tensor.numel() - part.numel()
        part = torch.cat([part, part.new_zeros(padding)])
        if kind == "weight":
            safe_set_local_fp32_param(entry.parameter, part)
        else:
            safe_set_local_optimizer_state(entry.parameter, part, kind)

    def steps_taken(self) -> int:
        """AdamW's step count, which its bias correction reads."""
        return max(int(state["step"]) for state in self._engine.basic_optimizer.state.values())

    def _fragment(self, entry: Entry, kind: Kind) -> tuple[int, torch.Tensor]:
        """Where this rank's part of the flattened parameter starts, and the part itself, flat."""
        parameter = entry.parameter
        if self._stage == 0:
            state = self._engine.basic_optimizer.state[parameter]
            return 0, (parameter.detach() if kind == "weight" else state[kind]).view(-1)
        if self._stage == 3:
            if kind == "weight":
                fragment = safe_get_local_fp32_param(parameter)
            else:
                fragment = safe_get_local_optimizer_state(parameter, kind)
            start = parameter.ds_tensor.numel() * dist.get_rank(parameter.ds_process_group)
            left = max(0, torch.Size(entry.held).numel() - start)
            return start, fragment.flatten()[:left]
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, torch.empty(0, dtype=self._dtype(), device=self._engine.device)
        fragment = mapping.get_hp_fragment(None if kind == "weight" else kind)
        return mapping.lp_fragment_address.start, fragment.detach()

    def _dtype(self) -> torch.dtype:
        return torch.promote_types(torch.float32, next(self._engine.module.parameters()).dtype)

    def _optimized(self) -> list[torch.Tensor]:
        """The tensors that torch's optimizer updates: parameters, or DeepSpeed's flat fp32 partitions."""
        if self._stage == 3:
            # stage 3 lends them to the optimizer only during a step
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._engine.basic_optimizer.param_groups for p in group["params"]]
