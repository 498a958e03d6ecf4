"""Megatron-LM's own tokenizers beside ours under the same names."""

from __future__ import annotations

import base64
import io
import json
import warnings
from pathlib import Path

import pytest
import sentencepiece

from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of optional accelerators that are not installed
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import SentencePieceTokenizer
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

TEXTS = [
    "the cat sat on the mat",
    "The MAT's 12345 dogs,\n\n  and a/b  c ",
    "",
    "naïve 漢字 😀 TheCat",
    "\n \n",
    "a</s>",
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"th", b"the", b" the", b" a", b"at", b"ca", b"cat", b" cat", b"The", b"\n\n", b"12"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("latin-1")}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path_factory.mktemp("tik") / "vocab.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.parametrize("vocab_size", [1267, 1260])
def test_tiktokenizer_gives_megatrons_ids(vocabulary: Path, vocab_size: int) -> None:
    ours = build_tokenizer("TikTokenizer", tokenizer_model=str(vocabulary), vocab_size=vocab_size)
    theirs = TikTokenTokenizer(str(vocabulary), vocab_size=vocab_size)
    for text in TEXTS[:-1]:
        assert ours.encode(text) == theirs.text_to_ids(text)
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
    # Unlike Megatron we let no text end a document.
    assert ours.eod in theirs.text_to_ids("a</s>") and ours.eod not in ours.encode("a</s>")


def test_a_vocabulary_that_is_too_short_names_the_size_that_fits(vocabulary: Path) -> None:
    with pytest.raises(UserError, match="give --vocab-size 1267"):
        build_tokenizer("TikTokenizer", tokenizer_model=str(vocabulary))


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_gives_megatrons_ids(tmp_path: Path, model_type: str) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:2] * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        model_type=model_type,
        minloglevel=2,
    )
    path = tmp_path / "a.model"
    path.write_bytes(model.getvalue())
    ours = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(path))
    theirs = SentencePieceTokenizer(str(path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.text_to_ids(text)
    assert (ours.eod, ours.vocab_size) == (theirs.eos_id, theirs.vocab_size)


def test_null_gives_megatrons_ids() -> None:
    ours, theirs = build_tokenizer("NullTokenizer", vocab_size=50), NullTokenizer(50)
    assert ours.encode("1 2 49") == theirs.text_to_ids("1 2 49")
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
