"""A run's tokenizer as the files that transformers' `AutoTokenizer` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rgpt.config.schema import DataConfig
from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.data.tokenizers.byte import ByteTokenizer
from megatron_rgpt.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_rgpt.data.tokenizers.null import NullTokenizer
from megatron_rgpt.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_rgpt.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
TRAINED_WITH = "megatron_rgpt_tokenizer"
"""Key of `tokenizer_config.json`: the name of the tokenizer that a run had."""


def run_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that a run's configuration names."""
    return build_tokenizer(
        data.tokenizer_type,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_model=data.tokenizer_model,
        vocab_size=data.vocab_size,
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_length: int) -> bool:
    """Write what `AutoTokenizer` needs into the folder; False where the ids stand for no text (`null`)."""
    if isinstance(tokenizer, NullTokenizer):
        return False
    try:
        import tokenizers
    except ImportError:
        raise UserError("exporting a tokenizer needs the package: pip install tokenizers") from None
    if isinstance(tokenizer, SentencePieceTokenizer):
        # transformers converts the model file as it loads it, with the packages sentencepiece and protobuf
        (folder / "tokenizer.model").write_bytes(tokenizer._model.serialized_model_proto())
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": True}
        end = tokenizer._model.id_to_piece(tokenizer.eod) if tokenizer.eod is not None else None
    else:
        if isinstance(tokenizer, ByteTokenizer):
            made = _byte_level({bytes([number]): number for number in range(256)}, None, {END_OF_TEXT: tokenizer.eod})
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            made = tokenizers.Tokenizer.from_str(tokenizer._model.to_str())
        else:
            encoding = tokenizer._encoding
            made = _byte_level(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)
        made.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        end = made.id_to_token(tokenizer.eod) if tokenizer.eod is not None else None
    # what `import` gives back: the same ids under another name would not match a run's data
    settings[TRAINED_WITH] = tokenizer.name
    named = {} if end is None else {"bos_token": end, "eos_token": end, "pad_token": end}
    shape = {"clean_up_tokenization_spaces": False, "padding_side": "left", "model_max_length": seq_length}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **named, **shape}, indent=1) + "\n")
    return True


def _byte_level(ranks: dict[bytes, int], pattern: str | None, special: dict[str, int]) -> tokenizers.Tokenizer:
    """A byte-pair encoding over bytes, from the rank of each of its byte strings. `pattern` cuts texts into words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    printable = _printable()
    names = {token: "".join(printable[byte] for byte in token) for token in ranks}
    merges = [tuple(names[half] for half in halves) for halves in _merges(ranks)]
    vocabulary = {names[token]: rank for token, rank in ranks.items()} | special
    # tiktoken takes a word that is in the vocabulary whole, whatever the merges say
    model = models.BPE(vocabulary, merges, ignore_merges=True)
    made = Tokenizer(model)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token is merged from, in the order of ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            lowest = min(joined)
            if lowest >= rank:
                break
            at = joined.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _printable() -> list[str]:
    """GPT-2's character for each byte: itself in Latin-1 where that prints, else the next one from U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]
