"""Writes the stub of the C++ module: python tools/stubs.py [FOLDER]

pybind11-stubgen reads types from docstrings only where `inspect` finds no signature. Our methods
have signatures, which cannot hold types; so it is told that they have none. The stub says types
alone: the docstrings are the module's.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pybind11_stubgen

_TABLES = ("_CLASSES", "_RANGES", "FEATURES")


def no_signature(function: Any) -> Any:
    """Stands for `inspect.getfullargspec`."""
    raise TypeError(f"{function!r} is read from its docstring")


def without_docstrings(source: str) -> str:
    """The stub without docstrings and tables, and with `...` where a body would be empty."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target).endswith(_TABLES):
            node.value = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            node.body = node.body or [ast.Expr(ast.Constant(...))]
    return re.sub(r":\n +\.\.\.\n\n", ": ...\n", ast.unparse(tree) + "\n\n")


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "python"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    inspect.getfullargspec = no_signature
    pybind11_stubgen.main(["fastdraft._core", "--output-dir", str(folder)])
    stub = folder / "fastdraft" / "_core.pyi"
    stub.write_text(without_docstrings(stub.read_text()))
