"""Hold a Hugging Face folder to one of our models: load it in a clean process, compare logits at every exit.

The process runs `check_export.py` alone, isolated from this project and offline, so it sees what a user will see.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rgpt.data.tokenizers import Tokenizer
from megatron_rgpt.errors import UserError
from megatron_rgpt.model.recurrent import RecurrentTransformer

TOLERANCE = 1e-4
"""Largest difference of logits over the largest logit, both models in fp32."""
_TEXTS = (
    "Hello world",
    "The quick brown fox, 1234567 times;\n\n\tnaïve café → 東京 🙂  two  spaces ",
    "def f(x):\n    return x",
)


@dataclass(frozen=True)
class Agreement:
    """What a clean process found."""

    exits: list[int]
    differences: list[float]
    """Largest difference of logits over the largest logit, at each exit."""
    tokenizer_fault: str | None
    """Why the folder's tokenizer is not the run's; None: it is, or there is none."""


def verify_folder(folder: Path, model: RecurrentTransformer, tokenizer: Tokenizer | None, what: str) -> Agreement:
    """Load the folder as a stranger would; with a tokenizer, its ids are compared too.

    Raises `UserError`, beginning with `what`, if the folder does not load or computes something else.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{what}: checking it needs the package: pip install transformers")
    with tempfile.TemporaryDirectory() as scratch:
        reference, result = Path(scratch) / "reference.safetensors", Path(scratch) / "result.json"
        exits = reference_file(model, tokenizer, reference)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            # remote code is copied there before it is imported: a fresh place cannot hold another version's
            "HF_MODULES_CACHE": str(Path(scratch) / "modules"),
        }
        script = Path(__file__).with_name("check_export.py")
        command = [sys.executable, "-I", str(script), str(folder), str(reference), str(result)]
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ended.returncode != 0:
            said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise UserError(f"{what}: transformers cannot load it: {said[-1]}")
        found = json.loads(result.read_text())
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if fault in found:
            raise UserError(f"{what}: {fault.replace('_', ' ')}: {', '.join(map(str, found[fault]))}")
    assert not found["ours_loaded"], "the exported code imported megatron_rgpt"
    for exit_, difference in zip(exits, found["differences"], strict=True):
        if not difference <= TOLERANCE:
            raise UserError(f"{what}: logits at exit {exit_} differ by {difference:.2g}, more than {TOLERANCE}")
    return Agreement(exits, found["differences"], found["tokenizer_fault"])


def reference_file(model: RecurrentTransformer, tokenizer: Tokenizer | None, path: Path) -> list[int]:
    """Write what `check_export.py` compares with; returns the exits, 0..R + 1 or 0 alone for a dense model."""
    exits = [0] if model.config.layout.is_dense else list(range(model.default_depth + 2))
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(model.vocab_size, (2, min(8, model.config.seq_length)), generator=generator)
    with torch.no_grad():
        logits_KBSV = model(tokens_BS, exits=exits)
    content = {"tokens": tokens_BS, "exits": torch.tensor(exits), "logits": logits_KBSV.contiguous()}
    for number, text in enumerate(_TEXTS if tokenizer is not None else ()):
        content[f"text.{number}"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        content[f"ids.{number}"] = torch.tensor(tokenizer.encode(text))
    save_file(content, path)
    return exits
