#!/usr/bin/env bash
# Fetches what `make gpu` needs on a machine that has Python, torch and Triton, but no network, into
# a folder to carry there. For Linux on x86-64 and the Python in PYTHON_VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."
carry=${1:-.carry}
most=64  # MiB
rm -rf "$carry" && mkdir -p "$carry"
pip download -q -d "$carry" --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  transformers click rich platformdirs filelock \
  pybind11 scikit-build-core ninja pytest pytest-xdist hypothesis
# The machine has its own, which its PyTorch is known to go with.
rm -f "$carry"/numpy-*
size=$(du -sm "$carry" | cut -f1)
echo "$carry holds $size MiB"
if [ "$size" -gt "$most" ]; then
  echo "$carry must hold at most $most MiB, got $size" >&2
  exit 1
fi
touch "$carry/.complete"
