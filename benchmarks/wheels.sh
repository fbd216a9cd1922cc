#!/usr/bin/env bash
# Collects the wheels that titanlite needs beside PyTorch, for a GPU machine without a network:
#
#     benchmarks/wheels.sh FOLDER [PYTHON_VERSION]        default 3.12
#
# There, in the repository (packages that are installed are left as they are):
#
#     python3 -m pip install --no-index --find-links FOLDER -r FOLDER/requirements.txt
#
# PyTorch, triton and NVIDIA's libraries are not among them: they are installed there. tests/distributed/test_cuda.py needs
# pytest, float8 needs torchao. Without matplotlib the page of benchmarks.gpu has no plot; `python -m benchmarks.gpu --page
# --results ...` adds it elsewhere.
set -euo pipefail
folder=$(mkdir -p "${1:?give the folder for the wheels}" && cd "$1" && pwd)
version=${2:-3.12}
cd "$(dirname "$0")/.."

cat >"$folder/requirements.txt" <<'LIST'
annotated-types
execnet
iniconfig
jinja2
markupsafe
numpy
packaging
pluggy
pydantic
pydantic-core
pygments
pytest
pytest-timeout
pytest-xdist
safetensors
tokenizers
torchao
tqdm
typing-extensions
typing-inspection
xxhash
LIST
# without dependencies: torchao's and tokenizers' are PyTorch and what only downloads need
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary :all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -c constraints.txt \
    -d "$folder" -r "$folder/requirements.txt"
ls -sh "$folder"
