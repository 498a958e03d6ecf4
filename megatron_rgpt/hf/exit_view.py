"""What a model would say leaving the loop after each step: next-token probabilities as text, and as a picture.

The paper's Figure 4: a row for each prompt, a column for each recurrence, the prelude-only output leftmost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rgpt.errors import UserError


@dataclass(frozen=True)
class ExitRow:
    """One prompt: the likeliest tokens at each exit, and the probability of the answer there."""

    prompt: str
    answer: str
    answer_probability: list[float]
    likeliest: list[list[tuple[str, float]]]


def exit_row(prompt: str, probabilities_KV: torch.Tensor, decode, answer: int | None = None, shown: int = 4) -> ExitRow:
    """`answer` is a token's id; None: what the last exit finds likeliest."""
    answer = int(probabilities_KV[-1].argmax()) if answer is None else answer
    top = probabilities_KV.topk(min(shown, probabilities_KV.shape[-1]))
    likeliest = [
        [(decode([token]), p) for token, p in zip(tokens, chances, strict=True)]
        for tokens, chances in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return ExitRow(prompt, decode([answer]), probabilities_KV[:, answer].tolist(), likeliest)


def exit_text(row: ExitRow) -> str:
    """A table: for each exit k the answer's probability and the likeliest tokens."""
    lines = [f"{row.prompt!r} -> {row.answer!r}", f"  k  p({row.answer!r})  likeliest next tokens"]
    for k, (chance, tokens) in enumerate(zip(row.answer_probability, row.likeliest, strict=True)):
        said = "  ".join(f"{token!r} {p:.3f}" for token, p in tokens)
        lines.append(f"{k:>3}  {chance:.4f}  {said}")
    return "\n".join(lines)


def plot_exits(rows: list[ExitRow], path: Path) -> None:
    """Write a PNG: cells hold each exit's likeliest token and its probability; colour is the answer's probability."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--show-exits draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    exits = len(rows[0].answer_probability)
    figure, axes = pyplot.subplots(figsize=(2.5 + 1.25 * exits, 1.2 + 0.8 * len(rows)))
    image = axes.imshow([row.answer_probability for row in rows], cmap="Greens", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for k, tokens in enumerate(row.likeliest):
            token, chance = tokens[0]
            right = token == row.answer
            color = "white" if row.answer_probability[k] > 0.6 else "black"
            weight = "bold" if right else "normal"
            # a dollar would begin a formula
            text = f"{token!r}\n{chance:.2f}".replace("$", r"\$")
            axes.text(k, y, text, ha="center", va="center", color=color, weight=weight, fontsize=9)
    axes.set_xticks(range(exits), ["prelude only" if k == 0 else f"step {k}" for k in range(exits)])
    labels = [f"{row.prompt[-30:]!r}\n→ {row.answer!r}".replace("$", r"\$") for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    figure.colorbar(image, label="probability of the answer")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--show-exits {path}: cannot be written ({error.strerror})") from None
    finally:
        pyplot.close(figure)
