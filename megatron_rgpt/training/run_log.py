"""What a run reports: console lines, a progress bar, metrics.jsonl, TensorBoard, Weights & Biases; from one rank."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_rgpt.config import Config
from megatron_rgpt.errors import UserError

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class IterationReport:
    """One logged iteration. Times and rates are means over the iterations since the last report."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    depth: float
    """Mean r over the iteration's samples."""
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_per_iteration: float
    model_tflops: float
    """Executed forward FLOPs x 3, per rank and second; recomputation not counted."""
    memory_gib: float
    """Peak of this rank: of the GPU, or of the process without one."""
    seconds_left: float


class RunLog:
    """Reports of one run; does nothing on ranks other than the first."""

    def __init__(self, first_rank: bool, start_iteration: int, train_iters: int) -> None:
        self._on, self._start, self._train_iters = first_rank, start_iteration, train_iters
        self._metrics = self._tensorboard = self._wandb = None
        # disable=None: shown on an interactive terminal alone
        self._bar = tqdm(
            total=train_iters,
            initial=start_iteration,
            disable=None if first_rank else True,
            unit="it",
            leave=False,
            file=sys.stderr,
        )

    def open(self, config: Config) -> None:
        """Open what is written to; on the first rank. Raises `UserError` or `OSError` where it cannot be."""
        if config.checkpoint.save is not None:
            done = self._start == self._train_iters or config.training.skip_train
            self._metrics = _open_metrics(Path(config.checkpoint.save) / METRICS, self._start, evaluate_again=done)
        if config.logging.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._tensorboard = SummaryWriter(config.logging.tensorboard_dir, purge_step=self._start + 1)
            except OSError as error:
                raise UserError(
                    f"--tensorboard-dir {config.logging.tensorboard_dir}: cannot be written ({error.strerror})"
                ) from None
        if config.logging.wandb_project is not None:
            self._wandb = _start_wandb(config)

    def say(self, text: str) -> None:
        """A line for people."""
        if self._on:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def progress(self) -> None:
        self._bar.update(1)

    def iteration(self, report: IterationReport) -> None:
        if not self._on:
            return
        self.say(_console_line(report, self._train_iters))
        record = {
            "iteration": report.iteration,
            "consumed_samples": report.consumed_samples,
            "loss": report.loss,
            "depth": report.depth,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "tokens_per_second": round(report.tokens_per_second, 1),
        }
        self._record(record, prefix="train")

    def evaluation(self, iteration: int, exits: list[int], losses: list[float], *, split: str = "valid") -> None:
        """Losses at the given exits; the last is that of the whole model."""
        if not self._on:
            return
        by_exit = dict(zip(exits, losses, strict=True))
        record: dict[str, Any] = {"iteration": iteration, f"{split}_loss": losses[-1]}
        # null for an exit that was not evaluated
        record["exit_losses"] = [by_exit.get(k) for k in range(exits[-1] + 1)]
        line = f"{split} loss at iteration {iteration}: {losses[-1]:.4f}"
        if len(exits) > 1:
            line += " | exits 0.." + f"{exits[-1]}: " + " ".join(f"{loss:.3f}" for loss in losses)
        self.say(line)
        self._record(record, prefix=split)

    def close(self) -> None:
        self._bar.close()
        for sink in (self._metrics, self._tensorboard):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _record(self, record: dict[str, Any], prefix: str) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()
        scalars = {f"{prefix}/{name}": value for name, value in record.items() if isinstance(value, float)}
        for k, loss in enumerate(record.get("exit_losses", [])):
            if loss is not None:
                scalars[f"{prefix}_exits/{k}"] = loss
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record["iteration"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["iteration"])


def _open_metrics(path: Path, start_iteration: int, *, evaluate_again: bool):
    """Open for appending; drop records of what a resumed run will do again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        try:
            kept = [line for line in lines if line.endswith("\n") and _stays(line, start_iteration, evaluate_again)]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{path}: not lines of records: move it away, a new one is begun") from None
        if kept != lines:
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(kept))
            temporary.replace(path)
    return path.open("a")


def _stays(line: str, start_iteration: int, evaluate_again: bool) -> bool:
    record = json.loads(line)
    last = start_iteration - 1 if evaluate_again and "loss" not in record else start_iteration
    return record["iteration"] <= last


def _start_wandb(config: Config):
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"--wandb-project {config.logging.wandb_project}: wandb is not installed: pip install wandb"
        ) from None
    return wandb.init(project=config.logging.wandb_project, name=config.logging.wandb_exp_name)


def _console_line(report: IterationReport, train_iters: int) -> str:
    width = len(str(train_iters))
    hours, seconds = divmod(int(report.seconds_left), 3600)
    return " | ".join(
        [
            f"iteration {report.iteration:>{width}}/{train_iters}",
            f"tokens {_short(report.consumed_tokens):>6}",
            f"loss {report.loss:7.4f}",
            f"depth {report.depth:5.2f}",
            f"lr {report.lr:.2e}",
            f"grad norm {report.grad_norm:6.3f}",
            f"{_short(report.tokens_per_second):>6} tokens/s",
            f"{report.seconds_per_iteration * 1e3:7.1f} ms/iteration",
            f"{report.model_tflops:7.3f} TFLOP/s",
            f"{report.memory_gib:5.2f} GiB",
            f"left {hours:d}:{seconds // 60:02d}:{seconds % 60:02d}",
        ]
    )


def _short(number: float) -> str:
    for unit in ("", "k", "M", "B"):
        if number < 999.5 or unit == "B":
            return f"{number:.0f}" if unit == "" else f"{number:.2f}{unit}"
        number /= 1000
    raise AssertionError
