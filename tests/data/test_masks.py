from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rgpt.data.masks import loss_mask, position_ids


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=4))
def test_positions_and_mask_equal_a_loop_over_tokens(rows: list[list[int]]) -> None:
    tokens_BS = np.array(rows)
    positions, mask = [], []
    for row in rows:
        position, of_row = 0, []
        for token in row:
            of_row.append(position)
            position = 0 if token == 2 else position + 1
        positions.append(of_row)
        mask.append([0.0 if token == 2 else 1.0 for token in row])
    np.testing.assert_array_equal(position_ids(tokens_BS, eod=2), positions)
    np.testing.assert_array_equal(loss_mask(tokens_BS, eod=2), mask)
