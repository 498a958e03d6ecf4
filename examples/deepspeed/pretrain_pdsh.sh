#!/bin/bash
# Pretrain on 8 nodes of 8 GPUs without a scheduler: deepspeed starts the ranks over pdsh and password-less ssh.
# Run from the repository's root, which every node sees under the same path:
#
#   examples/deepspeed/pretrain_pdsh.sh
#   NODES=2 GPUS_PER_NODE=4 examples/deepspeed/pretrain_pdsh.sh --train-iters 100
#
# Variables below come from the environment where set there; further arguments go to the main job.

set -euo pipefail
NODES=${NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HOSTFILE=${HOSTFILE:-examples/deepspeed/hostfile}
MASTER_PORT=${MASTER_PORT:-29500}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
CONFIG=${CONFIG:-examples/configs/recurrentgpt_large_64gpus.yaml}
DATA=${DATA:-data/openwebtext_text_document}
SAVE=${SAVE:-runs/rgpt}

export PATH=${PYTHON%/*}:$PATH
# The environment does not travel by itself (but for PYTHON* and a few): KEY=VALUE lines of this file do.
export DS_ENV_FILE=${DS_ENV_FILE:-$PWD/examples/deepspeed/.deepspeed_env}
# Without this, pdsh waits for ever for a node that dropped off the network.
export PDSH_SSH_ARGS_APPEND=${PDSH_SSH_ARGS_APPEND:--o ServerAliveInterval=15 -o ServerAliveCountMax=4}

# DATA is split into words: it may name a blend.
# shellcheck disable=SC2086
exec deepspeed --hostfile "$HOSTFILE" --num_nodes "$NODES" --num_gpus "$GPUS_PER_NODE" --master_port "$MASTER_PORT" \
    pretrain_rgpt.py --config "$CONFIG" --data-path $DATA --save "$SAVE" --load "$SAVE" "$@"
