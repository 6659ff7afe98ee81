"""Python programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

__all__ = ["run_python"]


def run_python(program: str, *arguments: object, **options: Any) -> str:
    """The output of a program that must succeed; options: those of `subprocess.run`."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
