#!/bin/sh
# Nine zero-shot tasks on an exported model, as the paper's tables have (it does not list them in its text; these are
# the usual nine of models of this size). Needs a connection to the hub: the harness fetches the data sets.
# Usage: examples/evaluate/nine_tasks.sh EXPORT [flags of evaluate.py, e.g. --num-recurrences 3 6 --kv-sharing average]
set -eu
[ $# -ge 1 ] || { echo "usage: $0 EXPORT [flags of evaluate.py]" >&2; exit 2; }
model=$1
shift
exec "${PYTHON:-python3}" "$(dirname "$0")/evaluate.py" --model "$model" --tasks \
    lambada_openai hellaswag piqa winogrande arc_easy arc_challenge boolq openbookqa sciq "$@"
