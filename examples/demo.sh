#!/bin/sh
# The whole path on one machine: tokenize, train through the deepspeed launcher, evaluate at every exit, sample, draw.
# Two ranks without a GPU; with GPUs, one rank on each, up to 16.
set -eu
cd "$(dirname "$0")/.."
RUN=${RUN:-runs/demo}
bin=.venv/bin
GLOBAL_BATCH=16

if [ ! -f data/stdlib_text_document.idx ]; then
    stdlib=$($bin/python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    # dist-packages: Debian's name for site-packages. The library's tests hold files that are broken on purpose.
    $bin/python tools/preprocess_data.py --input "$stdlib" --suffix .py --exclude site-packages dist-packages test \
        --on-error skip --tokenizer-type byte --append-eod --output-prefix data/stdlib
fi

gpus=$(nvidia-smi -L 2>/dev/null | wc -l) || gpus=0
ranks=2
if [ "$gpus" -gt 0 ]; then
    ranks=1
    while [ $((ranks * 2)) -le "$gpus" ] && [ $((ranks * 2)) -le $GLOBAL_BATCH ]; do ranks=$((ranks * 2)); done
else
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
fi

rm -rf "$RUN"
# DEMO_FLAGS, such as "--train-iters 2000", go over the configuration. The port keeps two demos apart.
# shellcheck disable=SC2086
$bin/deepspeed --num_gpus $ranks --master_port "${MASTER_PORT:-$((20000 + $$ % 12000))}" \
    pretrain_rgpt.py --config examples/configs/demo.yaml --micro-batch-size $((GLOBAL_BATCH / ranks)) \
    --save "$RUN" --tensorboard-dir "$RUN/tensorboard" ${DEMO_FLAGS:-}

$bin/python tools/report.py "$RUN"
echo "a sample:"
$bin/python tools/generate.py --load "$RUN" --prompt "def read_" --new-tokens 200
