"""Every launch example, as it is, on two real nodes: SLURM, deepspeed over ssh, Open MPI, MPICH train the same run.

Runs where the cluster of `README.md` can come up: as root, with its packages installed. Part of `make test-full`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
TOOLS = ("ip", "munged", "slurmctld", "slurmd", "sbatch", "sshd", "pdsh", "mpirun.openmpi", "mpirun.mpich", "fuser")
MPICH_LIBRARY = "libmpich.so.12"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None for tool in TOOLS),
        reason=f"needs root and {', '.join(TOOLS)} (tests/cluster/README.md)",
    ),
]

NODES, RANKS_PER_NODE = 2, 2
SBATCH = ["sbatch", "--wait", f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}"]
SBATCH += [f"--gpus-per-node={RANKS_PER_NODE}", "--cpus-per-task=1", "--time=15"]
TINY = "--layout 1+1x3+1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --tokenizer-type byte "
TINY += "--vocab-size 257 --split 8,2,0 --micro-batch-size 2 --global-batch-size 8 --depths-per-step 1 "
TINY += "--train-iters 3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 1"


class Cluster:
    """Two nodes and a head, and what a job on them needs: a folder that all see, and text to train on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = os.environ | {
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "CLU_PREFIX": "rgpttest",
            "CLU_NET": "10.78.0",
            "CLU_RUN": str(folder / "cluster"),
            "SLURM_CONF": str(folder / "cluster/slurm/slurm.conf"),
            "REPOSITORY": str(REPOSITORY),
            "PYTHON": sys.executable,
            "CONFIG": "examples/configs/recurrentgpt_small_isoflops.yaml",
            "DATA": str(folder / "tiny_text_document"),
            "NODES": str(NODES),
            "GPUS_PER_NODE": str(RANKS_PER_NODE),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def script(self, name: str, *arguments: str) -> None:
        subprocess.run([HERE / name, *arguments], env=self.environ, check=True)

    def run_on_head(self, command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HERE / "net.sh", "exec", "head", *command],
            env=self.environ | environ,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not pytest's folder: daemons live in it, and it must not go before they do.
    with tempfile.TemporaryDirectory(prefix="rgpt-cluster-") as folder:
        yield from cluster_in(Path(folder))


def cluster_in(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    (folder / "text").mkdir()
    for number in range(10):
        (folder / f"text/{number}.txt").write_text(f"{number} ranks, 2 nodes: who meets whom, and where?\n" * 50)
    preprocess = [sys.executable, "tools/preprocess_data.py", "--input", str(folder / "text")]
    preprocess += ["--output-prefix", str(folder / "tiny"), "--tokenizer-type", "byte"]
    subprocess.run(preprocess, cwd=REPOSITORY, check=True)
    try:
        for name in ("net.sh", "ssh.sh", "slurm.sh"):
            cluster.script(name, "up", str(NODES))
        yield cluster
    finally:
        for name in ("slurm.sh", "ssh.sh", "net.sh"):
            cluster.script(name, "down")


@pytest.fixture(scope="module")
def mpich_libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder where Debian's MPICH has the name under which mpi4py looks for it."""
    folder = tmp_path_factory.mktemp("mpich")
    linker = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    library = next(line.split("=> ")[1] for line in linker.splitlines() if MPICH_LIBRARY in line)
    (folder / "libmpi.so.12").symlink_to(library)
    return str(folder)


def launch(cluster: Cluster, launcher: str, mpich_libraries: str, flags: str, **environ: str) -> tuple[int, str]:
    """Run one of the examples with the main job's `flags`; exit code and all output."""
    if launcher in ("pretrain_8nodes", "pretrain_deepspeed"):
        log = cluster.folder / f"{environ['SAVE'].rpartition('/')[2]}.log"
        command = [*SBATCH, f"--output={log}", f"examples/slurm/{launcher}.sbatch", *flags.split()]
        result = cluster.run_on_head(command, **environ)
        return result.returncode, result.stderr + log.read_text()
    if launcher == "pdsh":
        command = ["examples/deepspeed/pretrain_pdsh.sh", *flags.split()]
    else:
        command = ["examples/mpi/pretrain_mpirun.sh", *flags.split()]
        environ["MPIRUN"] = f"mpirun.{launcher}"
        if launcher == "mpich":
            environ["LD_LIBRARY_PATH"] = mpich_libraries
    result = cluster.run_on_head(command, **environ)
    return result.returncode, result.stdout + result.stderr


needs_mpi4py = pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py (pip install -e .[mpi])")
LAUNCHERS = [
    "pretrain_8nodes",
    "pretrain_deepspeed",
    "pdsh",
    pytest.param("openmpi", marks=needs_mpi4py),
    pytest.param("mpich", marks=needs_mpi4py),
]


def training_lines(save: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [(line["iteration"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> list[tuple[int, float, float]]:
    """The same run on one node by torchrun."""
    save = cluster.folder / "reference"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NODES * RANKS_PER_NODE}"]
    command += ["pretrain_rgpt.py", "--config", cluster.environ["CONFIG"], "--data-path", cluster.environ["DATA"]]
    command += ["--save", str(save), *TINY.split()]
    subprocess.run(command, env=cluster.environ, cwd=REPOSITORY, check=True)
    return training_lines(save)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_trains_the_same_run_on_two_nodes(
    cluster: Cluster, launcher: str, mpich_libraries: str, reference: list[tuple[int, float, float]]
) -> None:
    save = cluster.folder / launcher
    code, output = launch(cluster, launcher, mpich_libraries, TINY, SAVE=str(save))
    assert code == 0, output
    assert all(f"node{node}" in output for node in range(1, NODES + 1))
    assert training_lines(save) == reference


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_bad_input_ends_every_launcher_with_its_line_and_not_with_success(
    cluster: Cluster, launcher: str, mpich_libraries: str
) -> None:
    save = cluster.folder / f"{launcher}-bad"
    code, output = launch(cluster, launcher, mpich_libraries, f"{TINY} --hidden-size 33", SAVE=str(save))
    assert code != 0
    assert "error: " in output and "--hidden-size 33" in output
    assert "Traceback" not in output
