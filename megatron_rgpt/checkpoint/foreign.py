"""What a path given to `--load` seems to be when it is no checkpoint of ours, and what to do with it.

Looks at names and first bytes alone. Nothing is ever unpickled: a pickle runs the code that it holds.
"""

from __future__ import annotations

import json
from pathlib import Path

_IMPORT = "tools/checkpoint_convert.py import --load {path} --save RUN makes a run of it"
_BY_HF = "convert it to a Hugging Face folder with its own tools, then tools/checkpoint_convert.py import takes that"
_PICKLES = ("*.pt", "*.pth", "*.ckpt", "*.bin")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def seems_to_be(path: Path) -> str | None:
    """A kind of checkpoint and what to do with it, in words that follow "PATH seems to be"; None: nothing known."""
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        return None
    if _is_hugging_face(path):
        return f"a Hugging Face folder: {_IMPORT.format(path=path)}"
    if any(path.glob("mp_rank_*_model_states.pt")) or any(path.glob("*/mp_rank_*_model_states.pt")):
        return f"a DeepSpeed checkpoint, which holds pickles: {_BY_HF}"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return f"a Megatron-LM checkpoint: {_BY_HF}"
    if any(path.glob("*.distcp")):
        return f"a torch.distributed.checkpoint folder: {_BY_HF}"
    pickles = sorted(file for pattern in _PICKLES for file in path.glob(pattern) if _is_pickle(file))
    if pickles:
        return f"a folder of torch pickles ({pickles[0].name}), which are not loaded as they may run code: {_BY_HF}"
    return None


def _file(path: Path) -> str:
    if _is_pickle(path):
        return f"a torch pickle, which is not loaded as it may run code: {_BY_HF}"
    return "a file: give a run's folder, or one checkpoint's"


def _is_hugging_face(folder: Path) -> bool:
    try:
        content = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content)


def _is_pickle(path: Path) -> bool:
    """By the first bytes: torch's zip of a pickle, or a bare one."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((_ZIP, _PICKLE))
    except OSError:
        return False
