"""What `--eod-mask-loss` and `--reset-position-ids` derive from a batch of tokens."""

from __future__ import annotations

import numpy as np


def loss_mask(tokens_BS: np.ndarray, eod: int) -> np.ndarray:
    """float32 [B, S]: 0 where the input token ends a document (what follows it cannot be foreseen), else 1."""
    return (tokens_BS != eod).astype(np.float32)


def position_ids(tokens_BS: np.ndarray, eod: int) -> np.ndarray:
    """int64 [B, S]: positions that start again at 0 behind each end of a document."""
    position_S = np.arange(tokens_BS.shape[1], dtype=np.int64)
    starts_BS = np.zeros(tokens_BS.shape, dtype=np.int64)
    starts_BS[:, 1:] = np.where(tokens_BS[:, :-1] == eod, position_S[1:], 0)
    return position_S - np.maximum.accumulate(starts_BS, axis=1)
