"""OpenWebText or FineWeb as JSONL, streamed from the Hugging Face hub: nothing but the output is kept on disk.

    pip install datasets
    python examples/data/hub_text.py openwebtext --output data/openwebtext.jsonl
    python examples/data/hub_text.py fineweb --output data/fineweb.jsonl --documents 15000000

Stopped and started again with the same output it goes on behind the last whole line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# Name on the hub, configuration, column of the text. The 10BT sample of FineWeb has about as many tokens as
# a run of the paper's recipe reads.
SOURCES = {
    "openwebtext": ("Skylion007/openwebtext", None, "text"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT", "text"),
}
LOG_SECONDS = 10.0


def stream(source: str, behind: int) -> Iterator[str]:
    """The texts of a source, those of the first `behind` documents left out."""
    try:
        import datasets
    except ImportError:
        sys.exit("error: this needs the Hugging Face client: pip install datasets")
    name, configuration, column = SOURCES[source]
    for row in datasets.load_dataset(name, configuration, split="train", streaming=True).skip(behind):
        yield row[column]


def whole_lines(part: Path) -> int:
    """Cut a file behind its last whole line; returns how many lines that leaves."""
    if not part.exists():
        return 0
    lines = end = 0
    with open(part, "rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
        file.truncate(end)
    return lines


def write(texts: Iterator[str], part: Path, done: int) -> None:
    """Append texts to the part file, with a line of progress now and then."""
    started = last = time.monotonic()
    size = 0
    with open(part, "a", encoding="utf-8") as file:
        for count, text in enumerate(texts, start=done + 1):
            size += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if time.monotonic() - last > LOG_SECONDS:
                last = time.monotonic()
                print(f"{count:,} documents, {size / (last - started) / 1e6:.1f} MB/s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", choices=sorted(SOURCES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--documents", type=int, help="stop after so many; default: all")
    arguments = parser.parse_args()
    if arguments.output.exists():
        sys.exit(f"{arguments.output} is there already: delete it to fetch it again")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    part = arguments.output.with_name(arguments.output.name + ".part")
    done = whole_lines(part)
    left = None if arguments.documents is None else max(0, arguments.documents - done)
    write(islice(stream(arguments.source, done), left), part, done)
    part.replace(arguments.output)


if __name__ == "__main__":
    main()
