"""Each part of the campaign runs: a few of its cases, the same ones each time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections import Counter

import pytest

from campaign import pool
from campaign.pool import run


# Not `fuzzing`, whose targets need Clang.
@pytest.mark.parametrize(
    ("part", "seeds"),
    [("decoding", 4), ("stores", 3), ("sharing", 2), ("memory", 7), ("faults", 3), ("restarts", 1)],
)
def test_cases_of_a_part_compare_something(part, seeds, monkeypatch, pytestconfig):
    # What parts set for their process must not reach the tests after these.
    for variable in ("OMP_NUM_THREADS", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
    # Parts start processes of their own.
    folders = [str(pytestconfig.rootpath / folder) for folder in ("tests", "tests/support")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    counts = sum((run(part, seed) for seed in range(seeds)), start=Counter())
    assert counts.total() > 0


def compute(_part, _seed):
    while True:
        pass


def wait(_part, _seed):
    time.sleep(1e6)


@pytest.mark.parametrize(
    ("case", "what"), [(compute, "computed for 2 s"), (wait, "waited for 2 s")]
)
def test_a_hanging_case_is_ended(case, what, monkeypatch):
    monkeypatch.setattr(pool, "run", case)
    monkeypatch.setattr(pool, "_LONGEST", 2.0)
    # Forked, so that the process has this case.
    worker = pool._Worker(multiprocessing.get_context("fork"))
    worker.begin("stores", 1)
    while not worker.has_ended():
        time.sleep(0.05)
    counts, failure = worker.answer()
    assert not counts
    assert failure == f"the process of the case: {what}"
    assert not worker.is_alive()
