"""Hosts share two cores with whatever else runs there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forks import Forks

# Threads that spin for each other on a busy machine take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, and so do all that fork: importing vLLM takes long."""
    for item in items:
        forks = {"vllm_forks", "vllm_v2_forks", "results"} & {*item.fixturenames}
        item.add_marker(pytest.mark.xdist_group("forks" if forks else item.path.name))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with the demo model's tokenizer."""
    from word_model import word_model

    return word_model(tmp_path_factory.mktemp("words"), Path(os.environ["FASTDRAFT_DEMO_MODEL"]))


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
