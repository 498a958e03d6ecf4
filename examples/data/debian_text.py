"""Real text that installs by name on Debian and Ubuntu, as JSONL: prose, a dictionary, or documentation.

    python examples/data/debian_text.py prose --output data/prose.jsonl

Packages are fetched and unpacked into a temporary folder; nothing is installed and no root is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path

# prose: Bible commentaries of the 19th century, public domain. dictionary: GCIDE, GPL. docs: Python's and Linux's own.
PACKAGES = {
    "prose": ["sword-comm-tdavid", "sword-comm-mhcc"],
    "dictionary": ["dict-gcide"],
    "docs": ["python3-doc", "linux-doc"],
}
DICTIONARY_CHUNK = 64 << 10


def download(package: str, folder: Path) -> None:
    """One package into `folder`. A fresh machine has no lists of packages yet: root fetches them first."""
    commands = [["apt-get", "download", package]]
    if os.geteuid() == 0:
        commands += [["apt-get", "update"], ["apt-get", "download", package]]
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode == 0 and command[1] == "download":
            return
    sys.exit(f"error: {' '.join(command)}: {done.stderr.strip()}: run apt-get update, or name another --package")


def fetch(packages: list[str], folder: Path) -> None:
    """Download packages with apt and unpack them below `folder`.

    A package that only stands for another one (python3-doc for python3.11-doc) is followed to it.
    """
    for package in packages:
        shown = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True).stdout
        follow = re.findall(rf"Depends: ({re.escape(package.split('-')[0])}\S*-doc\S*)", shown)
        for name in [package, *follow]:
            download(name, folder)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, folder / "root"], check=True)


def prose(root: Path) -> Iterator[str]:
    """SWORD modules: zlib blocks of OSIS XML, whose (offset, size, raw size) stand in the file ending in `s`."""
    for blocks in sorted(root.glob("usr/share/sword/modules/**/*.?zz")):
        data = blocks.read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", blocks.with_suffix(blocks.suffix[:-1] + "s").read_bytes()):
            xml = zlib.decompress(data[offset : offset + size]).decode("utf-8")
            text = unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(div|title|chapter)[^>]*>", "\n", xml)))
            text = re.sub(r"[ \t\x00]+", " ", text)
            yield re.sub(r"\s*\n\s*", "\n", text).strip()


def dictionary(root: Path) -> Iterator[str]:
    """A dictd file is plain gzip; entries are parted by blank lines and put together to pages."""
    for path in sorted(root.glob("usr/share/dictd/*.dict.dz")):
        page: list[str] = []
        size = 0
        text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        for entry in text.split("\n\n"):
            page.append(entry)
            size += len(entry)
            if size > DICTIONARY_CHUNK:
                yield "\n\n".join(page)
                page, size = [], 0
        yield "\n\n".join(page)


def docs(root: Path) -> Iterator[str]:
    """The reStructuredText sources that Sphinx leaves beside the pages it makes."""
    for path in sorted(root.glob("usr/share/doc/**/_sources/**/*.txt*")):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield data.decode("utf-8", errors="replace").replace("\x00", "")


READERS = {"prose": prose, "dictionary": dictionary, "docs": docs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("domain", choices=sorted(PACKAGES))
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--package", nargs="+", help="Debian packages to take it from, instead of the usual ones")
    arguments = parser.parse_args()
    documents = size = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # apt's own user writes here when root fetches
        fetch(arguments.package or PACKAGES[arguments.domain], Path(folder))
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.output.with_name(arguments.output.name + ".part")
        with open(part, "w", encoding="utf-8") as file:
            for text in {"prose": prose, "dictionary": dictionary, "docs": docs}[arguments.domain](
                Path(folder) / "root"
            ):
                if text:
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    documents += 1
                    size += len(text)
        if not documents:
            sys.exit(f"error: no {arguments.domain} found in {arguments.package or PACKAGES[arguments.domain]}")
        part.replace(arguments.output)
    print(f"{arguments.output}: {documents:,} documents, {size:,} characters")


if __name__ == "__main__":
    main()
