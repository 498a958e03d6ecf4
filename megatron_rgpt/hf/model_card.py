"""The README.md of an exported model: what it is, how it was trained, what it reaches, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rgpt.checkpoint.layout import CheckpointIndex
from megatron_rgpt.config import Config
from megatron_rgpt.config.flags import to_yaml
from megatron_rgpt.model.counts import count_parameters
from megatron_rgpt.training.report import read_metrics

_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50{arguments})[0]))
```"""


def model_card(config: Config, index: CheckpointIndex, folder: Path) -> str:
    """Markdown with the front matter of the hub. Losses are those logged up to the checkpoint in `folder`."""
    layout, counts = config.model.layout, count_parameters(config.model, index.vocab_size)
    kind = "dense GPT-2" if layout.is_dense else "RecurrentGPT (arXiv:2608.15062)"
    facts = [
        ("layout", f"`{layout}`" + ("" if layout.is_dense else " (prelude + core x recurrences + coda)")),
        ("width, heads", f"{config.model.hidden_size}, {config.model.num_attention_heads}"),
        ("context", f"{config.model.seq_length} tokens"),
        ("vocabulary", f"{index.vocab_size} ({config.data.tokenizer_type})"),
        ("parameters", f"{counts.total:,} stored ({counts.non_embedding:,} without embeddings)"),
        ("iteration", f"{index.iteration}"),
        ("tokens seen", f"{index.consumed_samples * config.model.seq_length:,}"),
    ]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# A {kind} language model",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts),
        "",
        "## Losses",
        "",
        *_losses(_records(folder), index.iteration),
        "",
        "## Use",
        "",
        _use(layout.is_dense),
        "",
        "## The run",
        "",
        "```yaml",
        *to_yaml(_without_places(config)).splitlines(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _use(dense: bool) -> str:
    if dense:
        return _USE.format(trust="", arguments="")
    text = _USE.format(trust=", trust_remote_code=True", arguments=", num_recurrences=4")
    return f"""{text}

`num_recurrences` (in `forward` and `generate`) is the depth, 0 or more. `kv_sharing` is what the KV cache keeps of a
core block over the recurrences: `full` (all), or one set, `average`, `first` or `last`. `exit_threshold` lets each
token leave the loop when its state changes by less than that (or, with `exit_criterion="kl"`, its next-token
distribution). `cache_implementation="static"` gives static shapes for `torch.compile`."""


def _records(folder: Path) -> list[dict[str, Any]]:
    """What the run logged: the metrics beside its checkpoints."""
    if not (folder.parent / "metrics.jsonl").is_file():
        return []
    iterations, evaluations = read_metrics(str(folder.parent))
    return [*iterations, *evaluations]


def _losses(records: list[dict[str, Any]], iteration: int) -> list[str]:
    past = [record for record in records if record.get("iteration", 0) <= iteration]
    trained = [record for record in past if "loss" in record]
    evaluated = [record for record in past if "valid_loss" in record]
    if not trained and not evaluated:
        return ["None were logged beside the checkpoint."]
    lines = ["nats per token", ""]
    if trained:
        lines.append(f"- training, iteration {trained[-1]['iteration']}: {trained[-1]['loss']:.4f}")
    if evaluated:
        last = evaluated[-1]
        lines.append(f"- validation, iteration {last['iteration']}: {last['valid_loss']:.4f}")
        if "exit_losses" in last:
            exits = last["exit_losses"]
            lines += ["", "| exit k |" + "".join(f" {k} |" for k in range(len(exits)))]
            lines += ["|---|" + "---|" * len(exits), "| loss |" + "".join(f" {loss:.4f} |" for loss in exits)]
    return lines


def _without_places(config: Config) -> Config:
    """The configuration without the folders of the machine it ran on; of data the names alone."""
    data = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    names = {name: tuple(Path(part).name for part in getattr(config.data, name)) for name in data}
    files = ("vocab_file", "merge_file", "tokenizer_model", "data_cache_path")
    folders = ("save", "save_interval", "load", "tensorboard_dir", "deepspeed_config")
    return config.changed(**names, **dict.fromkeys((*files, *folders)), finetune=False)
