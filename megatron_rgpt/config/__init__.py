"""Configuration of a run: dataclasses with their checks, YAML, Megatron-style flags."""

from megatron_rgpt.config.batch import BatchPlan, plan_batch
from megatron_rgpt.config.layout import Layout
from megatron_rgpt.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DepthConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)

__all__ = [
    "BatchPlan",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DepthConfig",
    "EvaluationConfig",
    "Layout",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "plan_batch",
]
