"""The report of what was compiled, and its renewal."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

EXPECTED = Path(__file__).parent / "expected.json"
HELD = ("shared", "instructions", "exponentials")

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/kernels_compiled needs a process without TRITON_INTERPRET=1")


def pytest_addoption(parser):
    parser.addoption(
        "--renew", action="store_true", help=f"write what kernels take to {EXPECTED.name}"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    # What is imported stays, and is left out where the collector goes over what Triton makes.
    gc.freeze()


@pytest.fixture(scope="session")
def expected(pytestconfig):
    """What each kernel is to take for each target, by name; nothing of another Triton's code."""
    import triton

    if pytestconfig.getoption("renew") or not EXPECTED.exists():
        return {}
    written = json.loads(EXPECTED.read_text())
    if written["triton"] != triton.__version__:
        return {}
    return {
        kernel: {target: dict(zip(HELD, values, strict=True)) for target, values in took.items()}
        for kernel, took in written["kernels"].items()
    }


def pytest_terminal_summary(terminalreporter, config):
    found = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "compiled":
                    kernel, target, took = value
                    found.setdefault(kernel, {})[target] = took
    if not found:
        return

    import triton
    from offline import TARGETS

    if config.getoption("renew"):
        renewed = {
            kernel: {target: [each[field] for field in HELD] for target, each in took.items()}
            for kernel, took in found.items()
        }
        if config.option.keyword:  # a part of them
            before = json.loads(EXPECTED.read_text())["kernels"]
            renewed = {
                name: before.get(name, {}) | renewed.get(name, {}) for name in before | renewed
            }
        lines = (
            f"{json.dumps(name)}: "
            + json.dumps({target: took[target] for target in TARGETS if target in took})
            for name, took in sorted(renewed.items())
        )
        kernels = ",\n".join(lines)
        EXPECTED.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n{kernels}\n}}}}\n')

    terminalreporter.section("compiled kernels: instructions a logit, registers")
    width = max(map(len, found))
    terminalreporter.write_line(" " * width + "".join(f"{target:>12}" for target in TARGETS))
    for kernel, took in sorted(found.items()):
        cells = (_cell(took.get(target)) for target in TARGETS)
        terminalreporter.write_line(kernel.ljust(width) + "".join(cells))


def _cell(took):
    if took is None:
        return f"{'-':>12}"
    instructions = took["instructions"]
    cost = "-" if instructions is None else f"{instructions:.1f}"
    return f"{cost:>8}{took['registers']:>4}"
