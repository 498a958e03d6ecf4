#!/usr/bin/env python
"""lm-eval-harness on an exported model, at chosen depths and KV strategies. Needs: pip install lm-eval accelerate."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from recurrent_lm import RecurrentLM


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="what tools/checkpoint_convert.py exported")
    parser.add_argument("--tasks", required=True, nargs="+", help="names of the harness's tasks, or of local ones")
    parser.add_argument("--include-path", metavar="FOLDER", help="folder of further tasks, as local_tasks.py makes")
    parser.add_argument("--num-recurrences", type=int, nargs="+", metavar="R", help="depths (default: the model's R)")
    parser.add_argument(
        "--kv-sharing", nargs="+", choices=("full", "last", "first", "average"), help="KV strategies [full]"
    )
    parser.add_argument("--exit-threshold", type=float, metavar="X", help="adaptive exit, at most R steps")
    parser.add_argument("--exit-criterion", choices=("state", "kl"), default="state")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="examples per task, for a trial")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU where there is one)")
    parser.add_argument("--output", metavar="FILE", help="write all results as JSON")
    return parser.parse_args()


def loops(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of the model's forward for each row of the table."""
    adaptive = {}
    if arguments.exit_threshold is not None:
        adaptive = {"exit_threshold": arguments.exit_threshold, "exit_criterion": arguments.exit_criterion}
    rows = itertools.product(arguments.num_recurrences or [None], arguments.kv_sharing or [None])
    return [
        {name: value for name, value in (("num_recurrences", depth), ("kv_sharing", kind)) if value is not None}
        | adaptive
        for depth, kind in rows
    ]


def main() -> None:
    arguments = parse_arguments()
    model = RecurrentLM(arguments.model, {}, batch_size=arguments.batch_size, device=arguments.device)
    manager = TaskManager(include_path=arguments.include_path)
    results = []
    for loop in loops(arguments):
        model.loop = loop
        found = simple_evaluate(
            model, tasks=arguments.tasks, task_manager=manager, limit=arguments.limit, bootstrap_iters=0
        )
        scores = {
            task: {name.partition(",")[0]: value for name, value in metrics.items() if isinstance(value, float)}
            for task, metrics in found["results"].items()
        }
        results.append({"loop": loop, "results": scores})
        settings = " ".join(f"{name}={value}" for name, value in loop.items()) or "as exported"
        for task, metrics in scores.items():
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(f"{settings:<40} {task:<20} {shown}", flush=True)
        accuracies = [metrics.get("acc_norm", metrics["acc"]) for metrics in scores.values() if "acc" in metrics]
        if len(accuracies) > 1:
            print(f"{settings:<40} {'mean accuracy':<20} {sum(accuracies) / len(accuracies):.4f}", flush=True)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
