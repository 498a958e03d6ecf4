"""Which rank this process is, and how it meets the others: one answer for every launcher.

`resolve` reads what `deepspeed`, `torchrun`, `srun` (also `deepspeed --launcher slurm`), `mpirun` (Open MPI, MPICH,
Intel MPI) or nobody (plain `python`) left in the environment and returns a `Placement`. `start` joins the
process group at that placement. Nothing here knows what the ranks will do.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from megatron_rgpt.errors import UserError
from megatron_rgpt.parallel.orphans import leave_when_orphaned

# Ports for SLURM jobs: below 32768, where Linux starts to hand out ports to outgoing connections.
FIRST_PORT, NUMBER_OF_PORTS = 12768, 20000

LOOPBACK = "127.0.0.1"

# What torch's `env://` needs, and the two that say where on the host a rank lives.
_EXPLICIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Placement:
    """Where one process stands among all of a run. `master_port` 0 means any free one (a single process)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} is not in 0..{self.world_size - 1} (launcher {self.launcher})")
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise UserError(
                f"rank {self.rank} of {self.world_size} claims local rank {self.local_rank} of "
                f"{self.local_world_size} on its host: the environment of launcher {self.launcher} contradicts itself"
            )
        if not 0 <= self.master_port < 65536 or (self.master_port == 0 and self.world_size > 1):
            raise UserError(f"MASTER_PORT={self.master_port}: give a port in 1..65535")
        if self.world_size > self.local_world_size and self.master_addr in ("localhost", LOOPBACK, "::1"):
            raise UserError(
                f"MASTER_ADDR={self.master_addr} means another machine on every host, and this run has several: "
                "set it to the host name of rank 0, or unset it where the launcher knows it (srun)"
            )


def resolve(environ: Mapping[str, str], meet_over_mpi: Callable[[], tuple[str, int]] | None = None) -> Placement:
    """The placement that the launcher of this process gave it.

    A complete set of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (`deepspeed` calls it LOCAL_SIZE),
    MASTER_ADDR and MASTER_PORT comes from the launcher nearest to the process and wins. Otherwise `mpirun`
    and `srun` tell the ranks, and MASTER_ADDR and MASTER_PORT, where set, the rendezvous. `mpirun` goes before
    `srun`: within an allocation it starts its own daemons by `srun`, and the ranks see both.

    `meet_over_mpi` finds rank 0's address and a free port by asking the other ranks; it is called only under
    `mpirun` with more than one rank and without MASTER_ADDR and MASTER_PORT. Default: over mpi4py.

    Raises `UserError` for numbers that are missing, malformed or contradict each other.
    """
    env = dict(environ)
    if "LOCAL_WORLD_SIZE" not in env and "LOCAL_SIZE" in env:
        env["LOCAL_WORLD_SIZE"] = env["LOCAL_SIZE"]
    missing = [name for name in _EXPLICIT if not env.get(name)]
    if not missing:
        return _explicit(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        placement = _mpi(env, "Open MPI", OPEN_MPI, meet_over_mpi)
    # Without the local rank, PMI_RANK comes from `srun --mpi=pmi2`, which SLURM's own variables describe.
    elif "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        placement = _mpi(env, "MPICH", HYDRA, meet_over_mpi)
    # The shell of a batch job has SLURM_PROCID and SLURM_NTASKS, too, but only `srun` makes steps.
    elif "SLURM_STEP_NUM_TASKS" in env:
        placement = _srun(env)
    elif any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        raise UserError(_half_set(env, missing))
    else:
        return Placement(0, 1, 0, 1, LOOPBACK, 0, "python")
    _check_agreement(env, placement)
    return placement


def start(placement: Placement, timeout_minutes: float, backend: str | None = None) -> str:
    """Join the default process group of torch and DeepSpeed; return the table of ranks, for rank 0 to print.

    `backend` is NCCL where there is CUDA, else gloo. A rank that does not arrive, and later a collective that
    does not end, is an error after `timeout_minutes`. Under a launcher, also see to it that this process does
    not outlive it (`orphans.py`). A process that ends well leaves the group by itself.
    Raises `UserError` if the rendezvous fails or a host has fewer GPUs than ranks.
    """
    os.environ.update(
        RANK=str(placement.rank),
        WORLD_SIZE=str(placement.world_size),
        LOCAL_RANK=str(placement.local_rank),
        LOCAL_WORLD_SIZE=str(placement.local_world_size),
        MASTER_ADDR=placement.master_addr,
        MASTER_PORT=str(placement.master_port),
    )
    leave_when_orphaned(placement.launcher)

    # Late: importing torch and DeepSpeed takes seconds, and `resolve` needs neither.
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device_index = _device_index(placement, torch.cuda.device_count())
        # DeepSpeed chooses the device by LOCAL_RANK.
        os.environ["LOCAL_RANK"] = str(device_index)
        torch.cuda.set_device(device_index)
        device = f"cuda:{device_index}"
    else:
        device = "cpu"
        # Read when DeepSpeed is first imported: spares it the search, and the user its warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            # each rank would take all cores: ranks of one host share them
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // placement.local_world_size))
    import deepspeed

    if device == "cpu":
        # DeepSpeed would compile its shared-memory collectives here: 10-30 s, and an error without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(
            backend or ("gloo" if device == "cpu" else "nccl"),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(minutes=timeout_minutes),
        )
        rows: list[tuple[int, str, int, str]] = [(0, "", 0, "")] * placement.world_size
        # The table is the first collective: ranks that cannot reach each other fail here, and not in training.
        dist.all_gather_object(rows, (placement.rank, socket.gethostname(), placement.local_rank, device))
    except RuntimeError as error:
        raise UserError(
            f"rank {placement.rank} of {placement.world_size} could not meet the others at MASTER_ADDR="
            f"{placement.master_addr} MASTER_PORT={placement.master_port} within {timeout_minutes:g} minutes: "
            f"{_first_line(error)}; check that all ranks started, and that this is an address of rank 0 with a free "
            "port (deepspeed and torchrun: --master_port)"
        ) from error
    atexit.register(_leave_group)
    return table_of_ranks(rows)


def table_of_ranks(rows: list[tuple[int, str, int, str]]) -> str:
    """One aligned line per (rank, host, local rank, device)."""
    cells = [("rank", "host", "local rank", "device")]
    cells += [(str(rank), host, str(local_rank), device) for rank, host, local_rank, device in sorted(rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join(f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in cells)


# Per MPI: the variables of rank, world size, local rank, local world size.
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _leave_group() -> None:
    """Destroy the process groups while Python is still whole.

    A thread of gloo releases the tensors of the last collective only after that has returned, and needs the
    interpreter's lock for it. Where the interpreter ends first, the process aborts ("terminate called without an
    active exception"): one exit in five of a loop of small collectives. Destroying a group would wait for its
    threads, if DeepSpeed did not hold it too; so the lock is also let go for a moment.
    After an error the exit code is bad anyway, and the peers, perhaps stuck, need not be waited for.
    """
    import torch.distributed as dist

    failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()
        time.sleep(0.2)


def _explicit(env: Mapping[str, str]) -> Placement:
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif "CROSS_RANK" in env or "LOCAL_SIZE" in env:
        launcher = "deepspeed"
    else:
        launcher = "environment"
        _check_exported_before_srun(env)
    rank, world_size, local_rank, local_world_size = (_integer(env, name) for name in _EXPLICIT[:4])
    address, port = env["MASTER_ADDR"], _integer(env, "MASTER_PORT")
    return Placement(rank, world_size, local_rank, local_world_size, address, port, launcher)


def _mpi(
    env: Mapping[str, str],
    launcher: str,
    names: tuple[str, str, str, str],
    meet_over_mpi: Callable[[], tuple[str, int]] | None,
) -> Placement:
    rank, world_size, local_rank, local_world_size = (_integer(env, name) for name in names)
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        address, port = env["MASTER_ADDR"], _integer(env, "MASTER_PORT")
    elif world_size == 1:
        address, port = LOOPBACK, 0
    else:
        address, port = (meet_over_mpi or _meet_over_mpi4py)()
    return Placement(rank, world_size, local_rank, local_world_size, address, port, launcher)


def _srun(env: Mapping[str, str]) -> Placement:
    world_size = _integer(env, "SLURM_STEP_NUM_TASKS")
    tasks_per_node = _expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _integer(env, "SLURM_NODEID")
    if sum(tasks_per_node) != world_size or node >= len(tasks_per_node):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={env.get('SLURM_STEP_TASKS_PER_NODE')} does not describe the "
            f"SLURM_STEP_NUM_TASKS={world_size} tasks of this step, with this one on node {node}"
        )
    address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", ""))
    if env.get("MASTER_PORT"):
        port = _integer(env, "MASTER_PORT")
    else:
        # Jobs that share a node, and steps that share a job, must not meet at the same port.
        job, step = _integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID")
        port = FIRST_PORT + (job + 4999 * step) % NUMBER_OF_PORTS
    rank, local_rank = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_LOCALID")
    return Placement(rank, world_size, local_rank, tasks_per_node[node], address, port, "srun")


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `rack[2-3,7]n[01-16],login` → `rack2n01`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list.strip())
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={node_list!r} names no host: set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^,\]-]+)[^\]]*\]", r"\1", first.group())


def _expand_counts(counts: str) -> list[int]:
    """SLURM's short form of a list of counts: `4(x2),1` → [4, 4, 1]."""
    expanded: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(count)] * int(repeat or 1)
    return expanded


def _meet_over_mpi4py() -> tuple[str, int]:
    """Rank 0's host name and a port that is free there, told to all ranks over MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"under mpirun, ranks find each other over mpi4py, which fails here ({_first_line(error)}): "
            "pip install mpi4py, or pass MASTER_ADDR (host of rank 0) and MASTER_PORT "
            "(mpirun -x NAME=VALUE in Open MPI, -genv NAME VALUE in MPICH)"
        ) from None
    world = MPI.COMM_WORLD
    # The name, not an address: which of a host's addresses the others can reach is for their resolver to say.
    rendezvous = world.bcast((socket.gethostname(), _free_port()) if world.rank == 0 else None)
    # That was all we need of MPI. Left running, it would keep threads, and complain about every early exit.
    MPI.Finalize()
    return rendezvous


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _device_index(placement: Placement, visible: int) -> int:
    """The GPU of this rank among the visible ones."""
    if placement.local_rank < visible:
        return placement.local_rank
    # `--gpus-per-task=1` shows each rank its own GPU only, as number 0.
    if visible == 1 and placement.launcher == "srun":
        return 0
    raise UserError(
        f"rank {placement.rank} is number {placement.local_rank} on {socket.gethostname()}, where {visible} GPUs are "
        f"visible to it: start at most as many ranks per host as GPUs (launcher {placement.launcher})"
    )


def _check_agreement(env: Mapping[str, str], placement: Placement) -> None:
    """What is set besides the launcher's own variables must say the same as they do."""
    for name, told in (
        ("RANK", placement.rank),
        ("WORLD_SIZE", placement.world_size),
        ("LOCAL_RANK", placement.local_rank),
        ("LOCAL_WORLD_SIZE", placement.local_world_size),
    ):
        if env.get(name) and _integer(env, name) != told:
            raise UserError(
                f"{name}={env[name]} contradicts {placement.launcher}, which started this process as {name}={told}: "
                f"unset {name}"
            )


def _check_exported_before_srun(env: Mapping[str, str]) -> None:
    """Catch `export RANK=$SLURM_PROCID` in a batch script: evaluated once, it makes every task rank 0."""
    if env.get("SLURM_STEP_NUM_TASKS") == env["WORLD_SIZE"] and env.get("SLURM_PROCID", env["RANK"]) != env["RANK"]:
        raise UserError(
            f"RANK={env['RANK']} contradicts SLURM_PROCID={env['SLURM_PROCID']} in a step of "
            f"{env['WORLD_SIZE']} tasks: unset RANK and LOCAL_RANK before srun"
        )


def _half_set(env: Mapping[str, str], missing: list[str]) -> str:
    present = ", ".join(f"{name}={env[name]}" for name in _EXPLICIT if env.get(name))
    return (
        f"{present} but no {', '.join(missing)}: set all of them, or none and start with deepspeed, torchrun, "
        "srun or mpirun"
    )


def _integer(env: Mapping[str, str], name: str) -> int:
    value = env.get(name)
    if value is None or not re.fullmatch(r"\d+", value):
        raise UserError(f"{name}={value} in the environment is not a number: the launcher should have set it")
    return int(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
