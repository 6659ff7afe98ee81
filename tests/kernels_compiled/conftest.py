"""Compiling needs a process that does not interpret."""

from __future__ import annotations

import gc
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/kernels_compiled needs a process without TRITON_INTERPRET=1")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    # What is imported stays, and is left out where the collector goes over what Triton makes.
    gc.freeze()
