"""Says at the end how many blocks of code on the pages were run, and which were not."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.stats.get("passed", [])
    found = [each for report in reports for each in getattr(report, "user_properties", ())]
    run = sum(count for name, count in found if name == "blocks run")
    others = [line for name, lines in found if name == "blocks not run" for line in lines]
    if run or others:
        terminalreporter.section("code on the pages")
        terminalreporter.line(f"{run} blocks of Python run, {len(others)} only compiled:")
        for line in others:
            terminalreporter.line(f"  {line}")
