"""Cases are many and say much; the processes that they start import from the same folders."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, pytestconfig):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")
    folders = [str(pytestconfig.rootpath / folder) for folder in ("tests", "tests/support")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
