#!/bin/bash
# Pretrain on 8 nodes of 8 GPUs with mpirun, of Open MPI or MPICH (and its kin: Intel MPI, MVAPICH).
# Run from the repository's root, which every node sees under the same path:
#
#   examples/mpi/pretrain_mpirun.sh
#   NODES=2 GPUS_PER_NODE=4 examples/mpi/pretrain_mpirun.sh --train-iters 100
#
# MPI starts the ranks and tells them where rank 0 is (mpi4py); the training itself communicates over NCCL or gloo.
# Where mpi4py is not at hand, set MASTER_ADDR to the first host and MASTER_PORT to a free port.
# Variables below come from the environment where set there; further arguments go to the main job.

set -euo pipefail
NODES=${NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HOSTFILE=${HOSTFILE:-examples/deepspeed/hostfile} # its first words are the hosts
MPIRUN=${MPIRUN:-mpirun}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
CONFIG=${CONFIG:-examples/configs/recurrentgpt_large_64gpus.yaml}
DATA=${DATA:-data/openwebtext_text_document}
SAVE=${SAVE:-runs/rgpt}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mapfile -t HOSTS < <(head -n "$NODES" "$HOSTFILE" | cut -d' ' -f1)
comma_separated() { (IFS=, && echo "$*"); }

# Open MPI calls itself OpenRTE where its mpirun goes by another name.
if "$MPIRUN" --version | grep -qE "Open ?(MPI|RTE)"; then
    # Bound to one core, as Open MPI would have it, a rank's threads would share that core.
    LAUNCH=(--host "$(comma_separated "${HOSTS[@]/%/:$GPUS_PER_NODE}")" --bind-to none)
    # The environment does not travel by itself; -x sends a variable along.
    for name in OMP_NUM_THREADS PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT; do
        [[ -v $name ]] && LAUNCH+=(-x "$name")
    done
else
    LAUNCH=(-hosts "$(comma_separated "${HOSTS[@]}")" -ppn "$GPUS_PER_NODE")
fi

# DATA is split into words: it may name a blend.
# shellcheck disable=SC2086
exec "$MPIRUN" -np $((NODES * GPUS_PER_NODE)) "${LAUNCH[@]}" "$PYTHON" pretrain_rgpt.py --config "$CONFIG" \
    --data-path $DATA --save "$SAVE" --load "$SAVE" "$@"
