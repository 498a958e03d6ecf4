#!/bin/sh
# Code, prose and a dictionary as three pairs, from what every Debian or Ubuntu machine has or fetches by name.
# Usage: examples/data/three_domains.sh [folder] [tokenizer type]. Ends with the flags that blend them.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-data}
tokenizer=${2:-byte}
python=${PYTHON:-.venv/bin/python}

stdlib=$($python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
# The library's tests hold files that are broken on purpose.
$python tools/preprocess_data.py --input "$stdlib" --suffix .py --exclude site-packages dist-packages test \
    --on-error skip --tokenizer-type "$tokenizer" --append-eod --output-prefix "$folder/code"
for domain in prose dictionary; do
    [ -f "$folder/$domain.jsonl" ] ||
        $python examples/data/debian_text.py $domain --output "$folder/$domain.jsonl"
    $python tools/preprocess_data.py --input "$folder/$domain.jsonl" \
        --tokenizer-type "$tokenizer" --append-eod --output-prefix "$folder/$domain"
done
echo "--data-path 0.5 $folder/code_text_document 0.3 $folder/prose_text_document 0.2 $folder/dictionary_text_document" \
    "--tokenizer-type $tokenizer"
