"""A plan drawn as a timeline: text for terminals and failing tests, a PNG for people."""

from __future__ import annotations

import os
from string import ascii_lowercase, ascii_uppercase

from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.placement import HUB
from megatron_rgpt.pipeline.schedule import Plan

IDLE = "."


def timeline(plan: Plan, width: int = 120) -> str:
    """One row per stage, time from left to right, a letter per micro-batch: upper case runs forward, lower backward.

    A column shows what runs at its middle.
    """
    rows = [[IDLE] * width for _ in range(plan.graph.stages)]
    for span in plan.spans():
        letters = ascii_lowercase if span.backward else ascii_uppercase
        letter = letters[span.micro_batch % len(letters)]
        first = _column(span.start, plan.makespan, width)
        for column in range(first, _column(span.end, plan.makespan, width)):
            rows[span.stage][column] = letter
    lines = [
        f"{'hub' if stage == HUB else f'stage {stage}':<9}{''.join(row)} {share:4.0%}"
        for stage, (row, share) in enumerate(zip(rows, plan.busy, strict=True))
    ]
    return "\n".join([_title(plan), *lines])


def _column(time: int, makespan: int, width: int) -> int:
    """The first column whose middle is not before `time`."""
    return 0 if makespan == 0 else -((makespan - 2 * width * time) // (2 * makespan))


def _title(plan: Plan) -> str:
    return (
        f"{plan.placement}: {len(plan.depths)} micro-batches of depth {min(plan.depths)} to {max(plan.depths)}, "
        f"busy share {plan.busy_share:.3f}"
    )


def save_timeline(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the timeline as an image (PNG, or what the suffix says). Raises `UserError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"{path}: drawing a timeline needs matplotlib: pip install 'megatron_rgpt[plots]'") from error
    from matplotlib import colormaps

    stages = plan.graph.stages
    figure = Figure(figsize=(14, 0.55 * stages + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = colormaps["viridis"]
    deepest = max(max(plan.depths), 1)
    for span in plan.spans():
        axes.broken_barh(
            [(span.start / plan.makespan, (span.end - span.start) / plan.makespan)],
            (span.stage - 0.4, 0.8),
            facecolors=colors(0.15 + 0.8 * plan.depths[span.micro_batch] / deepest),
            alpha=0.45 if span.backward else 1.0,
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(stages), ["hub", *(f"stage {stage}" for stage in range(1, stages))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the step; forward passes in full color, backward passes pale, lighter hue = deeper")
    axes.set_title(_title(plan), fontsize=10)
    figure.savefig(path, dpi=150)
