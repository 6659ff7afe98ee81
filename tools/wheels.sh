#!/usr/bin/env bash
# Builds a wheel for Linux with this machine's Python and compiler and tries it in a new
# environment: build/wheels. auditwheel names the wheel after the oldest glibc that it runs on. That
# depends on the glibc and the libstdc++ here, whose newest symbols the linker takes: the wheels
# workflow builds in manylinux images for older ones. A static libstdc++ does not help where it was
# built with the same glibc. Run this in the repository's root.
set -euo pipefail

python=${PYTHON:-python3}
rm -rf build/wheels build/wheels-unrepaired build/wheels-clean
python -m build --wheel --no-isolation --outdir build/wheels-unrepaired
auditwheel show build/wheels-unrepaired/*.whl
auditwheel repair --wheel-dir build/wheels build/wheels-unrepaired/*.whl

"$python" -m venv build/wheels-clean
build/wheels-clean/bin/pip install -qq build/wheels/*.whl
cd build/wheels-clean
bin/python -W error ../../tests/package/package_smoke.py
