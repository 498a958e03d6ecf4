"""A run's tokenizer, exported, gives the same ids through transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rgpt.data.tokenizers import build_tokenizer
from megatron_rgpt.hf.tokenizer_files import write_tokenizer

TEXT = "Don't: naïve café → 東京 🙂  two  spaces, 1234567\n\n\tdef f(x):\r\n        return x   \n"
SOURCES = sorted((Path(__file__).parent.parent / "model").glob("*.py"))


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_ids_text_and_end_are_the_same(kind: str, tmp_path: Path) -> None:
    ours = build_tokenizer(kind)
    assert write_tokenizer(ours, tmp_path, seq_length=100_000)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, *(path.read_text() for path in SOURCES)):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eod
    assert theirs.decode([ours.eod], skip_special_tokens=True) == ""
    assert len(theirs) == ours.vocab_size
    assert theirs(["a", "longer"], padding=True)["attention_mask"][0][0] == 0  # on the left, as decoders need it


def test_a_hugging_face_tokenizer_leaves_as_it_came(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    write_tokenizer(build_tokenizer("byte"), first, seq_length=128)
    ours = build_tokenizer("huggingface", tokenizer_model=str(first))
    assert write_tokenizer(ours, second, seq_length=128)
    theirs = AutoTokenizer.from_pretrained(second)
    assert theirs.encode(TEXT, add_special_tokens=False) == ours.encode(TEXT)
    assert theirs.eos_token_id == ours.eod == 256


def test_ids_that_stand_for_no_text_have_no_tokenizer(tmp_path: Path) -> None:
    assert not write_tokenizer(build_tokenizer("null", vocab_size=50), tmp_path, seq_length=128)
    assert not list(tmp_path.iterdir())
