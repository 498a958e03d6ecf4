#!/usr/bin/env python
"""Print a run's validation loss at every exit, and draw its curves to RUN/curves.png."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.training.report import exit_table, plot_curves, read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the --save folder of a run")
    args = parser.parse_args()
    with exit_on_user_error():
        iterations, evaluations = read_metrics(args.run)
        print(exit_table(evaluations))
        picture = Path(args.run) / "curves.png"
        plot_curves(iterations, evaluations, picture)
    print(f"curves drawn to {picture}")


if __name__ == "__main__":
    main()
