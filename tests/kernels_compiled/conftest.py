"""Compiling needs a process that does not interpret."""

from __future__ import annotations

import gc
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/kernels_compiled needs a process without TRITON_INTERPRET=1")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    # Imported objects stay: the collector skips them when it goes over what Triton makes.
    gc.freeze()
