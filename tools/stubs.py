"""Writes the stub of the C++ module: python tools/stubs.py [FOLDER]

pybind11-stubgen reads types from docstrings only where `inspect` finds no signature. Our methods
have signatures, which cannot hold types; so it is told that they have none.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pybind11_stubgen


def no_signature(function: Any) -> Any:
    """Stands for `inspect.getfullargspec`."""
    raise TypeError(f"{function!r} is read from its docstring")


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "python"
    folder = sys.argv[1] if len(sys.argv) > 1 else str(default)
    inspect.getfullargspec = no_signature
    pybind11_stubgen.main(["fastdraft._core", "--output-dir", folder])
