#!/usr/bin/env bash
# Create a virtual environment and install onchip into it.  Usage: tools/install.sh PYTHON VENV EXTRAS
# Without an NVIDIA GPU, PyTorch's CPU build is taken wherever one is to be had: the default Linux build drags in
# gigabytes of CUDA libraries.
set -euo pipefail
python=$1 venv=$2 extras=$3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "onchip needs Python 3.11 or later; $python is $("$python" -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

torch=$(grep '^torch==' constraints.txt)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null && [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "No NVIDIA GPU here: installing the CPU build of $torch"
    # First from wherever pip is set up to look, then from PyTorch's own index, whose address uv knows.
    pip install -q "$torch+cpu" 2>/dev/null ||
        { pip install -q uv && "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend cpu "$torch" 2>/dev/null; } ||
        echo "No CPU build of $torch is to be had here: the default build follows, with its CUDA libraries." >&2
fi
pip install -q -c constraints.txt -e ".[$extras]"
