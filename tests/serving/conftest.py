"""The environment of hosts in these tests: no ledger but one that a test asks for, and a clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdraft.serving.ledger import FOLDER_VARIABLE


@pytest.fixture(autouse=True)
def no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the ledger."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of steps, which stands at `now`."""
    from fastdraft.serving.vllm.v2 import step_clock

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: clock.now)
    return clock
