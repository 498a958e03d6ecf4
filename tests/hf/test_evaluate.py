"""The harness example: local tasks are what they say, and scores are log-likelihoods under the chosen loop."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "evaluate"


def test_a_local_task_has_one_true_continuation_among_others(tmp_path: Path) -> None:
    sources = Path(__file__).parent.parent.parent / "megatron_rgpt"
    command = [sys.executable, str(EXAMPLES / "local_tasks.py"), "--input", str(sources), "--suffix", ".py"]
    shape = [
        "--output",
        str(tmp_path),
        "--number",
        "20",
        "--context-characters",
        "80",
        "--continuation-characters",
        "20",
    ]
    subprocess.run([*command, *shape], check=True, capture_output=True)
    task = yaml.safe_load((tmp_path / "local_continuation.yaml").read_text())
    data = Path(task["dataset_kwargs"]["data_files"]["test"])
    texts = [path.read_text() for path in sources.rglob("*.py")]
    examples = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(examples) == 20
    for example in examples:
        goes_on = [any(example["context"] + choice in text for text in texts) for choice in example["choices"]]
        assert len(set(example["choices"])) == 4 and goes_on.index(True) == example["label"]
        assert sum(goes_on) == 1
    assert len({example["label"] for example in examples}) == 4


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install lm-eval accelerate")
def test_scores_are_those_of_generation_under_the_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_rgpt.data.tokenizers import build_tokenizer
    from megatron_rgpt.hf.cache_recurrent_gpt import RecurrentCache
    from megatron_rgpt.hf.export import copy_code
    from megatron_rgpt.hf.hf_config import to_hf
    from megatron_rgpt.hf.tokenizer_files import write_tokenizer
    from tests.hf.models import exported, lively_model

    monkeypatch.syspath_prepend(str(EXAMPLES))
    from recurrent_lm import RecurrentLM

    model = exported()
    model.save_pretrained(tmp_path)
    config = to_hf(lively_model().config, 77, eod=None, dtype="float64")
    (tmp_path / "config.json").write_text(json.dumps(config))
    copy_code(tmp_path)
    write_tokenizer(build_tokenizer("byte"), tmp_path, seq_length=40)
    scored = RecurrentLM(str(tmp_path), {}, batch_size=3, device="cpu")
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 1), (17, 4), (9, 7), (30, 20)]
    pairs = [[torch.randint(77, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    for kv_sharing in ("full", "average"):
        scored.loop = {"num_recurrences": 4, "kv_sharing": kv_sharing}
        scores = scored._loglikelihood_tokens([(("", ""), context, rest) for context, rest in pairs])
        for (context, rest), (score, _) in zip(pairs, scores, strict=True):
            context = context[-(41 - len(rest)) :]
            cache = RecurrentCache(model.config, num_recurrences=4, kv_sharing=kv_sharing)
            parts = [torch.tensor([context])] + ([torch.tensor([rest[:-1]])] if rest[1:] else [])
            with torch.no_grad():
                logits = [model(part, past_key_values=cache, num_recurrences=4).logits for part in parts]
            logits = torch.cat([logits[0][:, -1:], *logits[1:]], dim=1)[0].log_softmax(-1)
            assert score == pytest.approx(logits[range(len(rest)), rest].sum().item(), rel=1e-5)
