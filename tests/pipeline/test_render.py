"""Timelines, as text and as an image."""

from __future__ import annotations

import sys

import pytest

from megatron_rgpt.errors import UserError
from megatron_rgpt.pipeline.costs import Cost, Costs
from megatron_rgpt.pipeline.placement import Placement
from megatron_rgpt.pipeline.render import save_timeline, timeline
from megatron_rgpt.pipeline.schedule import plan

UNIT, FREE = Cost(2, 4, 1), Cost(0, 0, 0)
COSTS = Costs(block=UNIT, anchor=FREE, project=FREE, gate=FREE, head=UNIT, boundary=0)


def test_a_row_per_stage_shows_forward_passes_in_upper_case_and_backward_passes_in_lower_case():
    drawn = timeline(plan(Placement((0, 1), (0, 0), 1), [1], COSTS), width=18).splitlines()
    assert drawn == [
        "core=0,1 coda=0,0: 1 micro-batches of depth 1 to 1, busy share 0.500",
        "hub      AA..AAaaaa....aaaa  67%",
        "stage 1  ..AA......aaaa....  33%",
    ]


def test_a_column_shows_what_runs_at_its_middle():
    # 18 units in 4 columns with middles at 2.25, 6.75, 11.25, 15.75
    drawn = timeline(plan(Placement((0, 1), (0, 0), 1), [1], COSTS), width=4).splitlines()
    assert [line[9:13] for line in drawn[1:]] == [".a.a", "A.a."]


def test_a_step_without_cost_is_drawn_empty():
    free = Costs(FREE, FREE, FREE, FREE, FREE, 0)
    assert "hub      .... 100%" in timeline(plan(Placement((0, 1), (0, 0), 1), [1, 0], free), width=4)


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    save_timeline(plan(Placement((0, 1), (1, 0), 1), [0, 3, 2], COSTS), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'megatron_rgpt\[plots\]'"):
        save_timeline(plan(Placement((0, 1), (0, 0), 1), [1], COSTS), tmp_path / "timeline.png")
