"""Hosts share two cores with whatever else runs there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from forks import Forks

# Threads that spin for each other on a busy machine take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[Forks]:
    from vllm_forks import v1_forks

    with closing(v1_forks()) as forks:
        yield forks


@pytest.fixture(scope="session")
def vllm_v2_forks() -> Iterator[Forks]:
    from vllm_forks import v2_forks

    with closing(v2_forks()) as forks:
        yield forks
