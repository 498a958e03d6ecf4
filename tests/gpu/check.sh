#!/bin/bash
# What needs a GPU, as one short run: the main job in bf16 over NCCL on every GPU here, fp32 losses against the CPU's,
# a resume, and the benchmark of the model. Usage, from the repository's root: tests/gpu/check.sh [OUT_FOLDER]
set -euo pipefail
out=${1:-$(mktemp -d)}
python=${PYTHON:-.venv/bin/python}
gpus=$(nvidia-smi -L | wc -l)
small="--config examples/configs/demo.yaml --data-path $out/own_text_document --split 80,20,0 --micro-batch-size 2
    --train-iters 20 --eval-iters 2 --eval-interval 20 --log-interval 1 --global-batch-size 16 --save-interval 10"

$python tools/preprocess_data.py --input megatron_rgpt --suffix .py --tokenizer-type byte --append-eod \
    --output-prefix "$out/own" --overwrite
run() { # name, ranks, flags
    name=$1 ranks=$2; shift 2
    # shellcheck disable=SC2086
    $python -m torch.distributed.run --nproc-per-node "$ranks" pretrain_rgpt.py $small --save "$out/$name" --load "$out/$name" "$@"
}
run bf16 "$gpus" --bf16
run bf16-zero3 "$gpus" --bf16 --zero-stage 3 --recompute step
run fp32 1 --fp32
CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu run cpu 1 --fp32
run stopped 1 --fp32 --exit-interval 10
run stopped 1 --fp32
if [ "$gpus" -ge 2 ]; then
    run tensor 2 --fp32 --tensor-model-parallel-size 2
    run pipeline 2 --fp32 --pipeline-model-parallel-size 2
fi
$python - "$out" <<'PY'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
losses = {
    path.parent.name: [r["loss"] for r in map(json.loads, path.read_text().splitlines()) if "loss" in r]
    for path in out.glob("*/metrics.jsonl")
}
for name, values in sorted(losses.items()):
    apart = max(abs(a - b) / b for a, b in zip(values, losses["cpu"], strict=True))
    print(f"{name:<12} last loss {values[-1]:.4f}, at most {apart:.1e} from the CPU's fp32")
# noise is drawn by another generator on a GPU, so the CPU is near and the GPU layouts are equal
for name in ("stopped", "tensor", "pipeline"):
    if name in losses:
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses["fp32"], strict=True))
        assert apart < 1e-4, (name, apart)
PY
$python tools/benchmark.py model --batch 8 --seq-length 1024
