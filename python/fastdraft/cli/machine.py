"""What a measurement must be printed with: machine, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fastdraft

__all__ = ["command_line", "cpu_count", "describe_machine", "versions"]


def cpu_count() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> str:
    """The processor, its cores, and the system, in one line."""
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        # `platform` knows the architecture only.
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    cores = cpu_count()
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}, {platform.platform()}"


def versions() -> dict[str, str | None]:
    """Versions of fastdraft and of what it works with; `None` for what is not installed."""
    found: dict[str, str | None] = {
        "fastdraft": fastdraft.__version__,
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch", "transformers", "gguf"):
        found[package] = _version(package)
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_line() -> str:
    """The command that runs now, as a shell takes it."""
    return shlex.join(["fastdraft", *sys.argv[1:]])
