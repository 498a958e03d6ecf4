#!/bin/sh
# OpenWebText in GPT-2 tokens, for the rows of the paper's Table 1. Needs a connection, about 45 GB of disk for the
# text and 18 GB for the pair; an hour or so on 16 cores. It goes on where it was stopped.
# Usage: examples/data/openwebtext.sh [folder]; SOURCE=fineweb takes FineWeb's 10BT sample instead.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-data}
source=${SOURCE:-openwebtext}
python=${PYTHON:-.venv/bin/python}

[ -f "$folder/$source.jsonl" ] || $python examples/data/hub_text.py "$source" --output "$folder/$source.jsonl"
$python tools/preprocess_data.py --input "$folder/$source.jsonl" --tokenizer-type gpt2 --append-eod \
    --partitions 2 --output-prefix "$folder/$source"
# 20,000 steps of 480 samples of 1,024 tokens, and the validation samples: every rank finds the index ready.
$python tools/data.py prebuild --data-path "$folder/${source}_text_document" --tokenizer-type gpt2 \
    --seq-length 1024 --train-samples 9600000 --valid-samples 48000 --split 999,1,0 --vocab-size 50257
echo "--data-path $folder/${source}_text_document --tokenizer-type gpt2 --split 999,1,0"
