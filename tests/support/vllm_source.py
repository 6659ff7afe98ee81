"""vLLM's source, looked at without running it.

By default the source of the vLLM that is installed; FASTDRAFT_VLLM_SOURCE names the folder of
another version's (the one with `vllm/` in it).
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

__all__ = ["body", "module", "parameters", "says", "sources"]


def sources() -> list[Path]:
    installed = importlib.util.find_spec("vllm")
    found = []
    if installed is not None and installed.origin is not None:
        found.append(Path(installed.origin).parent)
    if "FASTDRAFT_VLLM_SOURCE" in os.environ:
        found.append(Path(os.environ["FASTDRAFT_VLLM_SOURCE"]) / "vllm")
    return found


def module(source: Path, name: str) -> ast.Module:
    return ast.parse((source / name).read_text(encoding="utf-8"))


def body(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef:
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
    )


def parameters(function: ast.AST) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in function.args.args]


def says(tree: ast.AST, text: str) -> bool:
    """Whether a node of the tree reads so."""
    wanted = ast.unparse(ast.parse(text).body[0])
    return any(
        ast.unparse(node) == wanted
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.stmt))
    )
