"""The documentation site: `make docs`."""

from __future__ import annotations

import re
from typing import Any

import fastdraft

project = "fastdraft"
author = "The fastdraft authors"
copyright = author  # noqa: A001
version = release = fastdraft.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
highlight_language = "text"
html_theme = "furo"
html_title = f"fastdraft {version}"
html_show_sphinx = False
smartquotes = False  # they turn the two hyphens of an option into a dash

# Docstrings mark code with single backticks.
default_role = "literal"
myst_heading_anchors = 3

# Hosts have environments of their own.
autodoc_mock_imports = ["llama_cpp", "sglang", "vllm"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# The link checker cannot load these: local servers, and anchors that GitHub makes in the browser.
linkcheck_ignore = [r"http://localhost.*", r"https://github.com/.*#"]
linkcheck_timeout = 20

ARGUMENT = re.compile(r"\w+(, \w+)*: ")
# What pybind11 writes into signatures, and how the stubs of other projects say it.
SIMPLER = (
    (r"self: [\w.]+(, )?", ""),
    (r"(?:typing\.)?SupportsInt \| (?:typing\.)?SupportsIndex", "int"),
    (r"(?:typing\.)?SupportsFloat \| (?:typing\.)?SupportsIndex", "float"),
    (r"typing\.Annotated\[(numpy\.typing\.ArrayLike), [\w.]+\]", r"\1"),
    (r"\b(?:fastdraft\.(?:_core|calibration|config|stats)|numpy\.typing|collections\.abc)\.", ""),
)


def read_docstring(
    _app: Any, what: str, _name: str, _thing: Any, _options: Any, lines: list[str]
) -> None:
    """Prepares a docstring for napoleon."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # or a colon in the first line ends the name of a type
        return
    # Docstrings of the C++ module name their arguments without a heading.
    begin = next((at for at, line in enumerate(lines) if ARGUMENT.match(line)), None)
    if what not in ("method", "class") or "Args:" in lines or begin is None or lines[begin - 1]:
        return
    end = next((at for at in range(begin, len(lines)) if not lines[at]), len(lines))
    lines[begin:end] = ["Args:", *(f"    {line}" for line in lines[begin:end])]


def simplify_signature(
    _app: Any, _what: str, _name: str, _thing: Any, _options: Any, signature: str, result: str
) -> tuple[str, str]:
    """Makes the C++ module's signatures readable."""
    for pattern, simple in SIMPLER:
        signature, result = (text and re.sub(pattern, simple, text) for text in (signature, result))
    return signature, result


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-process-signature", simplify_signature)
