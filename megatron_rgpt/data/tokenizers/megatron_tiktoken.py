"""Megatron-LM's TikTokenizer: a JSON list of ranked tokens behind 1,000 special ones.

Ids as Megatron-LM's `TikTokenTokenizer` (core/tokenizers/text/libraries/tiktoken_tokenizer.py) gives them
with its default flags: pattern v2, 1,000 special tokens first, 131,072 ids in all.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from megatron_rgpt.data.tokenizers.tiktoken_bpe import TiktokenTokenizer
from megatron_rgpt.errors import UserError

NUM_SPECIAL = 1000
DEFAULT_VOCAB_SIZE = 1 << 17
NAMED_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN_V2 = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def megatron_tiktoken_tokenizer(path: Path, vocab_size: int | None) -> TiktokenTokenizer:
    """The tokenizer of a Megatron vocabulary, cut to `vocab_size` ids (default 131,072). `</s>` ends a document.

    Raises:
        UserError: the file cannot be read, is no such list, or is too short for the size.
    """
    import tiktoken

    size = vocab_size or DEFAULT_VOCAB_SIZE
    try:
        entries = json.loads(path.read_text("utf-8"))[: size - NUM_SPECIAL]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + NUM_SPECIAL for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--tokenizer-model {path}: not a tiktoken vocabulary of Megatron's: {error!r}") from None
    if sorted(ranks.values()) != list(range(NUM_SPECIAL, size)):
        raise UserError(
            f"--tokenizer-model {path}: {len(ranks)} ranks and {NUM_SPECIAL} special tokens do not make {size} ids: "
            f"give --vocab-size {len(ranks) + NUM_SPECIAL}, or a file whose ranks are whole"
        )
    named = [*NAMED_SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(NAMED_SPECIAL), NUM_SPECIAL))]
    special = {token: number for number, token in enumerate(named)}
    encoding = tiktoken.Encoding(path.stem, pat_str=PATTERN_V2, mergeable_ranks=ranks, special_tokens=special)
    return TiktokenTokenizer(f"tiktoken:{path.name}", encoding, end="</s>")
