"""What a finished run learned, from its metrics.jsonl: a table of loss by exit, and a picture of the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rgpt.errors import UserError
from megatron_rgpt.training.run_log import METRICS


def read_metrics(run: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The logged iterations and the evaluations of a run's folder, in order."""
    path = Path(run) / METRICS
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): give the --save folder of a run") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not lines of JSON ({error})") from None
    return [r for r in records if "loss" in r], [r for r in records if "valid_loss" in r]


def exit_table(evaluations: list[dict[str, Any]]) -> str:
    """Validation loss at every exit of the last evaluation, and what each recurrence gained."""
    last = next((r for r in reversed(evaluations) if None not in r["exit_losses"]), None)
    if last is None:
        raise UserError("no evaluation at every exit in this run: train with --eval-exits all")
    losses = last["exit_losses"]
    lines = [f"validation loss by exit, iteration {last['iteration']}", "  k    loss    gain over k - 1"]
    for k, loss in enumerate(losses):
        gain = "" if k == 0 else f"{losses[k - 1] - loss:+.4f}"
        lines.append(f"{k:>3}  {loss:.4f}    {gain}".rstrip())
    lines.append(f"looping gains {losses[0] - losses[-1]:.4f} nats")
    return "\n".join(lines)


def plot_curves(iterations: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: loss over iterations, and loss by exit at each evaluation."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("curves need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    exits = [r for r in evaluations if None not in r["exit_losses"]]
    figure, axes = pyplot.subplots(1, 2 if exits else 1, figsize=(11 if exits else 6, 4.2), squeeze=False)
    over_time = axes[0][0]
    over_time.plot([r["iteration"] for r in iterations], [r["loss"] for r in iterations], color="0.7", label="training")
    over_time.plot(
        [r["iteration"] for r in evaluations], [r["valid_loss"] for r in evaluations], "o-", label="validation"
    )
    if exits and len(exits[-1]["exit_losses"]) > 1:
        first = [r["exit_losses"][0] for r in exits]
        over_time.plot([r["iteration"] for r in exits], first, "o--", label="validation, exit 0 (no recurrence)")
    over_time.set(xlabel="iteration", ylabel="loss, nats per token")
    over_time.legend()
    if exits:
        by_exit = axes[0][1]
        colors = pyplot.colormaps["viridis"]
        for number, record in enumerate(exits):
            shade = colors(0.9 * (1 - number / max(1, len(exits) - 1)))
            label = f"iteration {record['iteration']}" if number in (0, len(exits) - 1) else None
            by_exit.plot(record["exit_losses"], "o-", color=shade, label=label)
        by_exit.set(xlabel="exit k (recurrences)", ylabel="validation loss")
        by_exit.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
