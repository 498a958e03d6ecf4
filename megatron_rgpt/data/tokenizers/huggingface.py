"""Hugging Face `tokenizer.json` files, through the `tokenizers` library alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from megatron_rgpt.errors import UserError

END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, the folder of one, or `owner/name` on the hub. No special tokens are added around a text.

    The document's end is `eos_token` of the `tokenizer_config.json` beside it, else the first usual name
    that the vocabulary has.
    """

    def __init__(self, model: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UserError("--tokenizer-type huggingface needs the package: pip install tokenizers") from None
        path = Path(model)
        if not path.exists() and model.count("/") == 1 and not model.endswith(".json"):
            data, path = _fetch(model), Path(model, "tokenizer.json")
        else:
            path = path / "tokenizer.json" if path.is_dir() else path
            data = _read(path)
        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for a broken file
            reason = str(error).splitlines()[0]
            raise UserError(f"--tokenizer-model {path}: not a Hugging Face tokenizer.json: {reason}") from None
        # A file may carry the padding and the cut of a fine-tuning task: no part of a corpus.
        self._model.no_padding()
        self._model.no_truncation()
        # A text that spells a special token is ordinary text: only the pipeline ends documents.
        self._model.encode_special_tokens = True
        self.name = f"huggingface:{path.parent.name or path.name}"
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.cuts_before_spaces = _splits_as_gpt2(json.loads(data))
        self.eod = self._find_eod(path.with_name("tokenizer_config.json"))

    def _find_eod(self, config: Path) -> int | None:
        names = list(END_NAMES)
        if config.is_file():
            try:
                token = json.loads(config.read_text("utf-8")).get("eos_token")
            except ValueError as error:
                raise UserError(f"{config}: broken JSON: {error}") from None
            token = token.get("content") if isinstance(token, dict) else token
            names = [token] if token else names
        ids = (self._model.token_to_id(name) for name in names)
        return next((number for number in ids if number is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int32)

    def encode_continuation(self, text: str) -> np.ndarray:
        return self.encode_array(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)


def _splits_as_gpt2(content: dict) -> bool:
    """Whether texts are split by GPT-2's pattern and nothing else, so that no piece reaches over a space.

    Other normalizers and pre-tokenizers are free to look across spaces, and added tokens may hold some.
    """
    normalizer, splitter = content.get("normalizer"), content.get("pre_tokenizer") or {}
    added = [token["content"] for token in content.get("added_tokens", []) if not token.get("special")]
    return (
        (normalizer is None or normalizer.get("type") == "NFC")
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and not splitter.get("add_prefix_space", True)
        and content["model"].get("type") == "BPE"
        and not content["model"].get("dropout")
        and not any(" " in token and token.strip() for token in added)
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: cannot read: {error.strerror}") from None


def _fetch(name: str) -> bytes:
    """The tokenizer of a model on the hub, from its cache or over a connection."""
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_pretrained(name).to_str().encode("utf-8")
    except Exception as error:  # whatever the hub's client raises
        reason = str(error).splitlines()[0]
        raise UserError(f"--tokenizer-model {name}: no such file, and the hub did not give it: {reason}") from None
