"""Tokenizers by name. Each library is imported where it is used, so that none is a must."""

from __future__ import annotations

from pathlib import Path

from megatron_rgpt.data.tokenizers.base import Tokenizer
from megatron_rgpt.data.tokenizers.byte import ByteTokenizer
from megatron_rgpt.errors import UserError

# Megatron's names beside ours.
ALIASES = {
    "GPT2BPETokenizer": "gpt2",
    "TikTokenizer": "tiktoken",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "SentencePieceTokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}
TOKENIZER_TYPES = ("byte", "gpt2", "tiktoken", "sentencepiece", "huggingface", "null")

__all__ = ["ALIASES", "TOKENIZER_TYPES", "Tokenizer", "build_tokenizer"]


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer that `--tokenizer-type` names, ours or Megatron's name.

    Args:
        vocab_file, merge_file: GPT-2's `encoder.json` and `vocab.bpe`.
        tokenizer_model: the file (or, for tiktoken, the encoding's name) of the other kinds.
        vocab_size: needed by `null`; the size of a tiktoken vocabulary of Megatron's (.json).

    Raises:
        UserError: an unknown type, a file that is missing or broken, a library that is not installed.
    """
    kind = ALIASES.get(tokenizer_type, tokenizer_type)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        from megatron_rgpt.data.tokenizers.tiktoken_bpe import gpt2_tokenizer

        return gpt2_tokenizer(vocab_file, merge_file)
    if kind == "tiktoken":
        from megatron_rgpt.data.tokenizers import tiktoken_bpe

        model = _needed(tokenizer_model, tokenizer_type, "an encoding's name or a rank file")
        if model.endswith(".json"):
            from megatron_rgpt.data.tokenizers.megatron_tiktoken import megatron_tiktoken_tokenizer

            return megatron_tiktoken_tokenizer(Path(model), vocab_size)
        if Path(model).is_file():
            return tiktoken_bpe.rank_file_tokenizer(Path(model))
        return tiktoken_bpe.TiktokenTokenizer(f"tiktoken:{model}", tiktoken_bpe.fetch_encoding(model))
    if kind == "sentencepiece":
        from megatron_rgpt.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(_needed(tokenizer_model, tokenizer_type, "a .model file"))
    if kind == "huggingface":
        from megatron_rgpt.data.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(
            _needed(tokenizer_model, tokenizer_type, "a tokenizer.json, its folder, or owner/name")
        )
    if kind == "null":
        from megatron_rgpt.data.tokenizers.null import NullTokenizer

        if vocab_size is None:
            raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-size")
        return NullTokenizer(vocab_size)
    known = ", ".join([*TOKENIZER_TYPES, *ALIASES])
    raise UserError(f"--tokenizer-type {tokenizer_type}: unknown; one of {known}")


def _needed(model: str | None, tokenizer_type: str, what: str) -> str:
    if not model:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model: {what}")
    return model
