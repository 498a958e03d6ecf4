#!/usr/bin/env python
"""Make a multiple-choice task from local texts, for the harness without a network: which passage goes on like this?

Each example is the beginning of a passage, its true continuation, and continuations of three other passages, cut at
words. Texts are files (a passage per file), or a JSON dictionary or list (a passage per entry).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def read_passages(inputs: list[str], suffix: str) -> list[str]:
    """All passages of files, folders and JSON collections, in a fixed order."""
    passages = []
    for path in map(Path, inputs):
        if path.is_dir():
            passages += [file.read_text("utf-8", "replace") for file in sorted(path.rglob(f"*{suffix}"))]
        elif path.suffix == ".json":
            content = json.loads(path.read_text("utf-8"))
            entries = content.values() if isinstance(content, dict) else content
            passages += [
                entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in entries
            ]
        else:
            passages.append(path.read_text("utf-8", "replace"))
    return passages


def cut(passage: str, context: int, continuation: int, rng: random.Random) -> tuple[str, str] | None:
    """A beginning and its continuation, about that many characters each, the second beginning with its space."""
    if len(passage) < context + continuation + 40:
        return None
    start = rng.randrange(len(passage) - context - continuation - 20)
    middle = passage.find(" ", start + context)
    end = passage.find(" ", middle + continuation)
    if middle < 0 or end < 0:
        return None
    return passage[start:middle], passage[middle:end]


def examples(passages: list[str], number: int, context: int, continuation: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    pieces = []
    for passage in rng.sample(passages, len(passages)):
        piece = cut(passage, context, continuation, rng)
        if piece is not None:
            pieces.append(piece)
        if len(pieces) == number + 3:
            break
    made = []
    for begin, truth in pieces[:number]:
        choices = [other for _, other in rng.sample([piece for piece in pieces if piece[1] != truth], 3)]
        label = rng.randrange(4)
        choices.insert(label, truth)
        made.append({"context": begin, "choices": choices, "label": label})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help="files, folders, JSON collections")
    parser.add_argument("--suffix", default=".txt", help="of the files taken from folders [.txt]")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the evaluation's --include-path")
    parser.add_argument("--name", default="local_continuation", help="of the task [local_continuation]")
    parser.add_argument("--number", type=int, default=500, help="examples at most [500]")
    parser.add_argument("--context-characters", type=int, default=300)
    parser.add_argument("--continuation-characters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    passages = read_passages(arguments.input, arguments.suffix)
    made = examples(
        passages, arguments.number, arguments.context_characters, arguments.continuation_characters, arguments.seed
    )
    if len(made) < 1:
        raise SystemExit("error: --input holds too few texts that are long enough: give more, or shorter pieces")
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{arguments.name}.jsonl"
    data.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in made), "utf-8")
    (folder / f"{arguments.name}.yaml").write_text(TASK.format(name=arguments.name, data=data.resolve()))
    print(f"{len(made)} examples of {arguments.name} in {folder}")


if __name__ == "__main__":
    main()
