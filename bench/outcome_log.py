"""A plugin of pytest: writes each test's outcome to a file as soon as it is there.

A report that is written at the end is lost when there is no time for the last tests.

    OUTCOME_LOG=tests.jsonl python -m pytest -p outcome_log
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "OUTCOME_LOG"


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report)


def _write(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started this one hears of it too
    crash = getattr(report.longrepr, "reprcrash", None)
    message = report.longreprtext if crash is None else crash.message
    line = {"test": report.nodeid, "outcome": report.outcome, "message": message}
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
