"""The resolver of placements, on environments recorded from real launchers (`launch_environments.json`).

The recordings come from the cluster of `tests/cluster/`: two nodes, two ranks each (SLURM 22.05, Open MPI 4.1,
MPICH 4.0, DeepSpeed 0.19, torch 2.13), without variables that nobody reads.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.launch import Placement, first_host, resolve, start, table_of_ranks
from tests.ranks import RankPool

RECORDED = json.loads((Path(__file__).parent / "launch_environments.json").read_text())
REPOSITORY = Path(__file__).parents[2]


def met() -> tuple[str, int]:
    """Stands for the exchange over MPI, which needs an mpirun (`tests/cluster/`)."""
    return "node1", 41000


def no_meeting() -> tuple[str, int]:
    raise AssertionError("this launcher tells the address by itself")


@pytest.mark.parametrize(
    ("recording", "placement"),
    [
        ("deepspeed on one node", Placement(1, 2, 1, 2, "127.0.0.1", 29500, "deepspeed")),
        ("deepspeed over pdsh", Placement(3, 4, 1, 2, "10.77.0.1", 29500, "deepspeed")),
        ("deepspeed --launcher mpich", Placement(3, 4, 1, 2, "10.77.0.1", 29500, "deepspeed")),
        ("deepspeed --launcher slurm", Placement(3, 4, 1, 2, "node1", 12768 + 4 + 2 * 4999, "srun")),
        ("torchrun", Placement(1, 2, 1, 2, "localhost", 33585, "torchrun")),
        ("srun", Placement(3, 4, 1, 2, "node1", 12768 + 1, "srun")),
        ("srun of 3 tasks on 2 nodes", Placement(2, 3, 0, 1, "node1", 12768 + 3 + 2 * 4999, "srun")),
        ("srun --mpi=pmi2", Placement(3, 4, 1, 2, "node1", 12768 + 1 + 4999, "srun")),
        ("the shell of a SLURM batch job", Placement(0, 1, 0, 1, "127.0.0.1", 0, "python")),
    ],
)
def test_each_launcher_that_tells_the_address_is_understood(recording: str, placement: Placement) -> None:
    assert resolve(RECORDED[recording], meet_over_mpi=no_meeting) == placement


@pytest.mark.parametrize(
    ("recording", "placement"),
    [
        ("deepspeed --launcher openmpi", Placement(3, 4, 1, 2, "node1", 41000, "Open MPI")),
        ("mpirun (Open MPI)", Placement(3, 4, 1, 2, "node1", 41000, "Open MPI")),
        # Within a job the ranks also see the SLURM task of the daemon that started them: another rank and size.
        ("mpirun (Open MPI) in a SLURM job", Placement(2, 4, 0, 2, "node1", 41000, "Open MPI")),
        ("mpirun (MPICH)", Placement(3, 4, 1, 2, "node1", 41000, "MPICH")),
        ("mpirun (MPICH) in a SLURM job", Placement(3, 4, 1, 2, "node1", 41000, "MPICH")),
    ],
)
def test_under_mpirun_ranks_agree_on_an_address_over_mpi(recording: str, placement: Placement) -> None:
    assert resolve(RECORDED[recording], meet_over_mpi=met) == placement


@pytest.mark.parametrize("recording", ["mpirun (Open MPI)", "mpirun (MPICH)", "srun"])
def test_a_given_rendezvous_goes_before_the_launchers_own(recording: str) -> None:
    environ = RECORDED[recording] | {"MASTER_ADDR": "node1-ib", "MASTER_PORT": "6000"}
    placement = resolve(environ, meet_over_mpi=no_meeting)
    assert (placement.master_addr, placement.master_port) == ("node1-ib", 6000)
    assert (placement.rank, placement.world_size) == (3, 4)


def test_nothing_set_is_one_process_alone() -> None:
    assert resolve({}) == Placement(0, 1, 0, 1, "127.0.0.1", 0, "python")


def test_a_single_mpi_rank_needs_no_mpi4py() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert resolve(environ, meet_over_mpi=no_meeting).world_size == 1


def test_steps_of_one_job_and_jobs_of_one_node_meet_at_different_ports() -> None:
    ports = {
        resolve(RECORDED["srun"] | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(4_000_000, 4_000_050)
        for step in range(4)
    }
    assert len(ports) == 50 * 4
    assert min(ports) >= 12768 and max(ports) < 32768


BY_HAND = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "6000",
}


def test_variables_set_by_hand_are_taken_when_complete() -> None:
    assert resolve(BY_HAND) == Placement(1, 4, 1, 2, "node1", 6000, "environment")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_a_half_set_environment_is_told_what_is_missing(name: str) -> None:
    environ = {key: value for key, value in BY_HAND.items() if key != name}
    with pytest.raises(UserError, match=rf"but no {name}: set all of them"):
        resolve(environ)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, r"rank 4 is not in 0\.\.3"),
        ({"RANK": "first"}, "RANK=first in the environment is not a number"),
        ({"RANK": "-1"}, "RANK=-1 in the environment is not a number"),
        ({"LOCAL_RANK": "2"}, "claims local rank 2 of 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "claims local rank 1 of 8"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost means another machine on every host"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(BY_HAND | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recording", "changes", "message"),
    [
        ("srun", {"WORLD_SIZE": "64"}, "WORLD_SIZE=64 contradicts srun"),
        ("srun", {"RANK": "0"}, "RANK=0 contradicts srun"),
        ("srun", BY_HAND | {"RANK": "0"}, "RANK=0 contradicts SLURM_PROCID=3"),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_TASKS_PER_NODE=2 does not describe"),
        ("srun", {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST='' names no host"),
        ("srun", {"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost means another machine"),
        ("mpirun (Open MPI)", {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts Open MPI"),
        ("mpirun (MPICH)", {"PMI_SIZE": ""}, "PMI_SIZE= in the environment is not a number"),
    ],
)
def test_contradictions_to_the_launcher_are_refused(recording: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(RECORDED[recording] | changes, meet_over_mpi=met)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu[007,010-016],login", "gpu007"),
        ("rack[2-3,7]n[01-16],a", "rack2n01"),
        ("dgx-a.example.org,dgx-b", "dgx-a.example.org"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_the_table_of_ranks_has_a_line_per_rank_in_order() -> None:
    table = table_of_ranks([(1, "node10", 1, "cuda:1"), (0, "node9", 0, "cuda:0")])
    assert [line.split() for line in table.splitlines()] == [
        ["rank", "host", "local", "rank", "device"],
        ["0", "node9", "0", "cuda:0"],
        ["1", "node10", "1", "cuda:1"],
    ]


def start_again() -> tuple[str, str]:
    """`start` in a rank of the pool, whose environment is complete and whose group exists."""
    return start(resolve(os.environ), timeout_minutes=1), dist.get_backend()


def test_every_rank_gets_the_table_of_all(ranks: RankPool) -> None:
    first, second = ranks.run(start_again, world=2)
    assert first == second
    table, backend = first
    assert backend == "gloo"
    host = socket.gethostname()
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["0", host, "0", "cpu"],
        ["1", host, "1", "cpu"],
    ]


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in BY_HAND}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environ, cwd=REPOSITORY, capture_output=True, text=True
    )


START = """
import os
from megatron_rgpt.errors import exit_on_user_error
from megatron_rgpt.parallel.launch import resolve, start
with exit_on_user_error():
    print(start(resolve(os.environ), timeout_minutes=0.05))
"""


def test_plain_python_starts_alone_and_compiles_nothing() -> None:
    result = run_python(START)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-4:] == ["0", socket.gethostname(), "0", "cpu"]
    assert "ninja" not in result.stderr


@pytest.mark.parametrize(("ending", "left"), [("", True), ("raise SystemExit(0)", True), ("1 / 0", False)])
def test_a_run_that_ends_well_leaves_its_group_before_python_ends(ending: str, left: bool) -> None:
    # What is registered first runs last.
    first = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print('left', not dist.is_initialized()))
"""
    result = run_python("\n".join([first, START, ending]))
    assert result.stdout.splitlines()[-1] == f"left {left}", result.stderr


def test_a_rank_whose_peers_never_come_ends_with_one_line_that_names_the_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    result = run_python(START, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **two)
    assert result.returncode == 2, result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: rank 0 of 2 could not meet the others")
    assert f"MASTER_PORT={port}" in error


def test_a_port_in_use_ends_with_one_line_that_names_it() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        result = run_python(START, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **two)
    assert result.returncode == 2, result.stderr
    assert f"MASTER_PORT={port}" in result.stderr.splitlines()[-1]
    assert "in use" in result.stderr.splitlines()[-1]
