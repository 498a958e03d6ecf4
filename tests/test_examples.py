"""Every example configuration resolves, and is the run it says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rgpt.config import Config
from megatron_rgpt.config.flags import read_yaml
from megatron_rgpt.training.plan import describe
from megatron_rgpt.training.prepare import resolve_config

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))

TOTALS = {
    "dense_small": "124.44",
    "dense_medium": "354.82",
    "dense_large": "774.03",
    "recurrentgpt_small_isoflops": "63.60",
    "recurrentgpt_medium_isoflops": "171.13",
    "recurrentgpt_large_isoflops": "290.29",
    "recurrentgpt_medium_isoparams": "360.07",
    "recurrentgpt_large_isoparams": "782.23",
}


def load(path: Path) -> Config:
    return Config().changed(**read_yaml(str(path)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_configuration_resolves_on_one_rank_and_on_two(path: Path) -> None:
    for ranks in (1, 2):
        assert describe(resolve_config(load(path), ranks))["batch"]["train_iters"] > 0


def test_the_configuration_of_the_launch_scripts_fits_their_8_nodes_of_8_gpus() -> None:
    scripts = [*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("pretrain_*.sh")]
    assert len(scripts) == 4
    for script in scripts:
        (name,) = re.findall(r"CONFIG:-examples/configs/([\w.+]+)\.yaml", script.read_text())
        path = next(path for path in CONFIGS if path.stem == name)
        assert describe(resolve_config(load(path), 64))["batch"]["tokens_per_iteration"] == 512 * 1024


@pytest.mark.parametrize("name", TOTALS)
def test_every_dense_and_recurrent_row_of_table_1_has_its_model_and_the_full_recipe(name: str) -> None:
    path = next(path for path in CONFIGS if path.stem == name)
    run = resolve_config(load(path), 4)
    facts = describe(run)
    assert f"{facts['counts']['total'] / 1e6:.2f}" == TOTALS[name]
    assert facts["batch"]["tokens_per_iteration"] == 491_520
    assert round(facts["batch"]["tokens"] / 1e9, 1) == 9.8
    optimizer = run.config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_iters) == (6e-4, 6e-5, 2000)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)


def test_the_rungs_of_the_ladder_add_one_thing_each() -> None:
    rungs = [load(path).model for path in CONFIGS if path.stem.startswith("ladder_")]
    switches = [(str(m.layout), m.state_noise_std > 0, m.anchor, m.gate) for m in rungs]
    assert switches == [
        ("0+1x12+0", False, False, False),
        ("1+1x10+1", False, False, False),
        ("1+1x10+1", True, False, False),
        ("1+1x10+1", True, True, False),
        ("1+1x10+1", True, True, True),
    ]
