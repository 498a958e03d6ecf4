"""Checkpoints to Hugging Face folders and back: nothing lost, nothing taken on trust, one line for bad input."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from megatron_rgpt.checkpoint.layout import find_checkpoint
from megatron_rgpt.checkpoint.read import load_model
from megatron_rgpt.config.flags import parse_invocation
from megatron_rgpt.errors import UserError
from megatron_rgpt.hf.export import ExportOptions, export
from megatron_rgpt.hf.import_folder import import_folder
from megatron_rgpt.hf.names import logical_parameters
from megatron_rgpt.hf.verify import verify_folder
from tests.jobs import flags, job, metrics
from tests.ranks import RankPool
from tools import checkpoint_convert


@pytest.fixture(scope="module")
def run(ranks: RankPool, byte_pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 1+1x3+1 on two ranks, 8 iterations."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    ranks.run(job, flags(byte_pair, f"--save {folder} --zero-stage 1"), world=2)
    return folder


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's export, in shards."""
    return export(str(run), str(tmp_path_factory.mktemp("exports") / "model"), ExportOptions(shard_bytes=60_000)).folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock GPT-2 as transformers saves it."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=77, n_positions=24, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    )
    path = tmp_path_factory.mktemp("gpt2") / "model"
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def weights(run: Path) -> dict[str, torch.Tensor]:
    return logical_parameters(load_model(str(run))[0])


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def complaint(argv: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> str:
    monkeypatch.setattr(sys, "argv", ["checkpoint_convert.py", *argv])
    with pytest.raises(SystemExit) as left:
        checkpoint_convert.main()
    said = capfd.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_an_export_has_all_that_a_hugging_face_folder_needs(run: Path, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    code = {f"{kind}_recurrent_gpt.py" for kind in ("configuration", "modeling", "cache", "blocks", "adaptive")}
    assert code | {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: shard for shard in shards for name in load_file(folder / shard)}
    assert held == index["weight_map"]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.iterdir())
    card = (folder / "README.md").read_text()
    last = metrics(run)[-1]
    assert f"{last['valid_loss']:.4f}" in card and "1+1x3+1" in card
    assert all(f"{loss:.4f}" in card for loss in last["exit_losses"])
    assert str(run.parent) not in card
    assert not list(folder.parent.glob("*.tmp"))


def test_what_was_exported_imports_to_the_same_weights_and_trains_on(
    run: Path, folder: Path, ranks: RankPool, byte_pair: str, tmp_path: Path
) -> None:
    report = import_folder(str(folder), str(tmp_path / "run"))
    assert max(report.agreement.differences) < 1e-5 and len(report.agreement.differences) == 5
    before, after = weights(run), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # the flags that it names are those of the run
    named = parse_invocation(report.flags.split()).config
    _, config, _ = load_model(str(run))
    assert named.model.layout == config.model.layout and named.data.tokenizer_type == "byte"
    more = f"--load {tmp_path / 'run'} --finetune --save {tmp_path / 'on'} --train-iters 3 --lr 1e-12"
    ranks.run(job, flags(byte_pair, more), world=2)
    last = metrics(tmp_path / "on")[-1]
    assert last["iteration"] == 3
    assert last["exit_losses"] == pytest.approx(metrics(run)[-1]["exit_losses"], rel=1e-5)


def test_a_stock_gpt2_imports_and_leaves_as_it_came_but_for_the_precision_asked_for(gpt2: Path, tmp_path: Path) -> None:
    report = import_folder(str(gpt2), str(tmp_path / "run"))
    assert str(report.config.model.layout) == "3" and report.config.model.gelu == "tanh"
    assert max(report.agreement.differences) < 1e-5
    back = export(str(tmp_path / "run"), str(tmp_path / "back"), ExportOptions(dtype="bf16"))
    assert back.architecture == "GPT2LMHeadModel"
    before, after = load_file(gpt2 / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() - {"lm_head.weight"} == after.keys()
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in after)
    assert not list((tmp_path / "back").glob("*.py"))


def test_openais_own_layout_of_gpt2_imports(gpt2: Path, tmp_path: Path) -> None:
    bare = copied(gpt2, tmp_path / "bare")
    state = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(gpt2 / "model.safetensors").items()
    }
    state.pop("lm_head.weight", None)
    state["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    save_file(state, bare / "model.safetensors", metadata={"format": "pt"})
    import_folder(str(bare), str(tmp_path / "run"))
    stock = GPT2LMHeadModel.from_pretrained(gpt2).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs = load_model(str(tmp_path / "run"))[0](tokens), stock(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_export_that_computes_something_else_is_not_passed(run: Path, folder: Path, tmp_path: Path) -> None:
    model, _, _ = load_model(str(run))
    wrong = copied(folder, tmp_path / "wrong")
    code = (wrong / "blocks_recurrent_gpt.py").read_text()
    assert code.count("torch.lerp(h_BND, proposal_BND") == 1
    swapped = code.replace("torch.lerp(h_BND, proposal_BND", "torch.lerp(proposal_BND, h_BND")
    (wrong / "blocks_recurrent_gpt.py").write_text(swapped)
    with pytest.raises(UserError, match=r"^wrong: logits at exit 1 differ by"):
        verify_folder(wrong, model, None, "wrong")


def damaged(kind: str, folder: Path, gpt2: Path) -> None:
    """Make `folder`, a copy of a good one, bad."""
    config = json.loads((folder / "config.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    if kind == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-9])
    elif kind == "missing shard":
        shards[1].unlink()
    elif kind == "other architecture":
        config["model_type"] = "llama"
    elif kind == "other width":
        config["hidden_size"] = 64
    elif kind == "no config":
        (folder / "config.json").unlink()
        return
    elif kind == "broken config":
        (folder / "config.json").write_text("{")
        return
    elif kind == "lacks a field":
        del config["n_core"]
    elif kind == "pickle":
        shutil.rmtree(folder)
        folder.mkdir()
        shutil.copy(gpt2 / "config.json", folder)
        torch.save({"wte.weight": print}, folder / "pytorch_model.bin")
        return
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", ["model-00002-of", "not a whole safetensors file"]),
        ("missing shard", ["model-00002-of", "is missing"]),
        ("other architecture", ["config.json", "model_type 'llama'", "only recurrent_gpt and gpt2"]),
        ("other width", ["has shape [257, 32], config.json says [257, 64]"]),
        ("no config", ["config.json", "cannot be read (No such file"]),
        ("broken config", ["config.json", "broken JSON"]),
        ("lacks a field", ["config.json", "lacks 'n_core'"]),
        ("pickle", ["pytorch_model.bin", "holds more than tensors", "model.safetensors instead"]),
    ],
)
def test_a_bad_folder_is_named_in_one_line_and_leaves_no_run(
    kind: str, words: list[str], folder: Path, gpt2: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    bad = copied(folder, tmp_path / "bad")
    damaged(kind, bad, gpt2)
    said = complaint(["import", "--load", str(bad), "--save", str(tmp_path / "run")], monkeypatch, capfd)
    assert all(word in said for word in words), said
    assert find_checkpoint(str(tmp_path / "run")) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_inner": 64}, "n_inner 64"),
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"n_layer": 2}, "h.2.attn.c_attn.bias has no place in a 2 model of ours"),
        ({"n_layer": 4}, "no file holds the tensor transformer.h.3."),
    ],
)
def test_a_gpt2_that_is_not_our_dense_model_is_refused(change: dict, words: str, gpt2: Path, tmp_path: Path) -> None:
    bad = copied(gpt2, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError) as error:
        import_folder(str(bad), str(tmp_path / "run"))
    assert words in str(error.value)


def test_an_export_of_a_damaged_or_missing_checkpoint_leaves_nothing(
    run: Path, folder: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    def said(load: Path, output: Path) -> str:
        return complaint(["export", "--load", str(load), "--output", str(output)], monkeypatch, capfd)

    bad = copied(run, tmp_path / "run")
    file = next(find_checkpoint(str(bad)).glob("weights*"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    assert f"{file.name}: content differs from its hash" in said(bad, tmp_path / "out")
    assert "no checkpoint there" in said(tmp_path / "nowhere", tmp_path / "out")
    assert "cannot be written" in said(run, Path("/proc/nowhere/out"))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()
    assert f"--output {folder} exists" in said(run, folder)
    assert "--save" in complaint(["import", "--load", str(folder), "--save", str(run)], monkeypatch, capfd)
    assert "--max-shard-size" in complaint(
        ["export", "--load", str(run), "--output", "x", "--max-shard-size", "big"], monkeypatch, capfd
    )


def _with_little_room(function, *arguments) -> None:
    """A file over 40,000 bytes cannot be written: as on a full disk, an error from the system."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    function(*arguments)


def test_a_full_disk_is_said_and_leaves_nothing(run: Path, gpt2: Path, ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--output .*out: cannot be written .*File too large"):
        ranks.run(_with_little_room, export, str(run), str(tmp_path / "out"), ExportOptions(), world=1)
    with pytest.raises(UserError, match=r"^--save .*run: cannot be written .*File too large"):
        ranks.run(_with_little_room, import_folder, str(gpt2), str(tmp_path / "run"), world=1)
    assert not list(tmp_path.glob("out*")) and not list((tmp_path / "run").glob("*"))
