"""Documents in pieces against the same documents held whole."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rgpt.data import chunks, giant
from megatron_rgpt.data.chunks import Lines
from megatron_rgpt.data.inputs import list_inputs
from megatron_rgpt.data.job import Job
from megatron_rgpt.data.preprocess import preprocess
from megatron_rgpt.data.tokenizers import Tokenizer, build_tokenizer
from megatron_rgpt.data.tokenizers.tiktoken_bpe import gpt2_files as installed_files

GPT2 = build_tokenizer("gpt2")
BYTE = build_tokenizer("byte")

TEXT = st.text(
    st.one_of(st.sampled_from(' \n"\\.a1\té漢\u00a0😀'), st.characters(exclude_categories=["Cs"])), max_size=300
)
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
RECORD = st.dictionaries(TEXT, VALUE, max_size=3).flatmap(
    lambda others: st.tuples(st.permutations([*others, "text"]), TEXT).map(
        lambda drawn: {key: drawn[1] if key == "text" else others[key] for key in drawn[0]}
    )
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is giant, and read a few bytes at a time."""
    monkeypatch.setattr(giant, "GIANT_BYTES", 8)
    monkeypatch.setattr(giant, "PIECE_BYTES", 16)


def documents(folder: Path, source: Path, tokenizer: object, keys: tuple[str, ...] = ("text",)) -> dict[str, bytes]:
    """The output files of the source; they are made anew each time."""
    for old in folder.glob("out*"):
        old.unlink()
    job = Job(
        files=list_inputs([str(source)]),
        output_prefix=str(folder / "out"),
        tokenizer=tokenizer,  # type: ignore[arg-type]
        keys=keys,
        append_eod=True,
        stop_on_error=False,
    )
    manifests = preprocess(job)
    found = {path.name: path.read_bytes() for path in folder.glob("out*") if path.suffix in (".bin", ".idx")}
    return {**found, "skipped": json.dumps([manifest.skipped_examples for manifest in manifests]).encode()}


class Whole:
    """The same tokenizer without the promise that its texts can be cut."""

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer
        self.cuts_before_spaces = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tokenizer", [GPT2, BYTE], ids=["gpt2", "byte"])
@settings(max_examples=80, deadline=None)
@given(records=st.lists(RECORD, min_size=1, max_size=4), ascii_only=st.booleans(), packed=st.booleans())
def test_json_lines_in_pieces_equal_whole_ones(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: object, records: list, ascii_only: bool, packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("giant")
    records = [*records, {"text": "so that there is one"}]
    data = "\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records).encode()
    source = folder / ("in.jsonl.gz" if packed else "in.jsonl")
    source.write_bytes(gzip.compress(data) if packed else data)
    assert documents(folder, source, tokenizer) == documents(folder, source, Whole(tokenizer))


@pytest.mark.usefixtures("small")
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_text_files_in_pieces_equal_whole_ones(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("giant")
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text(text, newline="")
    (folder / "in" / "b.txt").write_text("so that there is one more file than that")
    assert documents(folder, folder / "in", GPT2) == documents(folder, folder / "in", Whole(GPT2))


@pytest.mark.usefixtures("small")
def test_each_key_of_a_giant_line_gets_its_own_text(tmp_path: Path) -> None:
    lines = [{"b": "b b b " * 20, "x": [1, {"a": "no"}], "a": "a a a " * 30}, {"a": "short one", "b": "here"}]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    assert documents(tmp_path, source, GPT2, ("a", "b")) == documents(tmp_path, source, Whole(GPT2), ("a", "b"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a b c d e f g h', "broken JSON: the line ends within a string"),
        ('{"text": "a b c d e f g h\\', "broken JSON: the line ends within a string"),
        ('{"text": "a b c d e f g h", ', "broken JSON"),
        ('{"text": "a b c d e f g h"} x', "broken JSON: more behind the object"),
        ('{"text" "a b c d e f g h"}', "broken JSON: expected a colon"),
        ('{"text": "a b c d e f \\q g h"}', "broken JSON: Invalid \\escape"),
        ('{"text": "a b c d \\u0000 f g h"}', "NUL characters"),
        ('{"text": "a b c d \\ud800 f g h"}', "half a surrogate pair"),
        ('{"text": ["a b c d e f g h"]}', "'text' is not a string"),
        ('{"other": "a b c d e f g h i"}', "no key 'text'"),
        ('{"text": "a b c d", "text": "e f g h"}', "key 'text' twice"),
        ('{"other": 12x4, "text": "e f g h i j"}', "is no value"),
        ('["a b c d e f g h i j k l m n o p"]', "broken JSON: expected an object"),
        ('{"text": "", "other": "a b c d e f g"}', "empty document"),
    ],
)
def test_a_bad_giant_line_is_left_out_whole_and_the_next_ones_stay(tmp_path: Path, line: str, reason: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"text": "one two three four"}}\n{line}\n{{"text": "five six seven eight"}}\n')
    found = documents(tmp_path, source, BYTE)
    texts = BYTE.decode(np.frombuffer(found["out_text_document.bin"], "<u2").tolist())
    assert texts == "one two three four<|endoftext|>five six seven eight<|endoftext|>"
    (example,) = json.loads(found["skipped"])[0]
    assert example.startswith(f"{source}:2: ") and reason in example


@pytest.mark.usefixtures("small")
def test_a_giant_line_cut_off_by_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    words = " ".join(str(number) for number in random.integers(0, 10**9, 30_000))
    packed = gzip.compress((json.dumps({"text": "good one here"}) + "\n" + json.dumps({"text": words})).encode())
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(packed[: len(packed) // 2])
    found = documents(tmp_path, source, BYTE)
    texts = BYTE.decode(np.frombuffer(found["out_text_document.bin"], "<u2").tolist())
    assert texts == "good one here<|endoftext|>"
    assert "damaged or truncated" in json.loads(found["skipped"])[0][0]


def test_ordinary_lines_do_not_come_in_pieces(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n' * 1000)
    files = list_inputs([str(source)])
    work = chunks.Cutter(files, ["text"], pieces=True)
    start, end = chunks.Position(), chunks.Position(1)
    assert all(isinstance(chunk.work, Lines) for chunk in work.chunks(start, end, start))


def sentencepiece_model(folder: Path, **options: object) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat", "a dog, 12 dogs", "x \\ y.", "é 漢 a"] * 9),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    path = folder / "a.model"
    path.write_bytes(model.getvalue())
    return str(path)


CUTTABLE = {
    "gpt2": {},
    "byte": {},
    "bpe": {"model_type": "bpe"},
    "bpe as Llama": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "bpe without prefix": {"model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "huggingface": {},
}


@pytest.fixture(scope="module", params=CUTTABLE)
def cuttable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every kind of tokenizer that promises not to notice a safe cut."""
    folder = tmp_path_factory.mktemp("model")
    if request.param.startswith("bpe"):
        model = sentencepiece_model(folder, **CUTTABLE[request.param])
        return build_tokenizer("sentencepiece", tokenizer_model=model)
    if request.param == "huggingface":
        tokenizers.ByteLevelBPETokenizer(*installed_files()).save(str(folder / "tokenizer.json"))
        return build_tokenizer("huggingface", tokenizer_model=str(folder))
    return build_tokenizer(request.param)


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
@example(text="the cat  sat a dog")
def test_no_cuttable_tokenizer_notices_a_safe_cut(cuttable: Tokenizer, text: str) -> None:
    assert cuttable.cuts_before_spaces
    if cut := giant.last_safe_cut(text):
        parts = [*cuttable.encode_array(text[:cut]), *cuttable.encode_continuation(text[cut:])]
        assert parts == cuttable.encode(text)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe", "add_dummy_prefix": False},
        {"model_type": "bpe", "treat_whitespace_as_suffix": True},
        {"model_type": "bpe", "split_by_whitespace": False},
    ],
)
def test_models_that_look_across_spaces_promise_nothing(tmp_path: Path, options: dict[str, object]) -> None:
    model = sentencepiece_model(tmp_path, **options)
    assert not build_tokenizer("sentencepiece", tokenizer_model=model).cuts_before_spaces
