"""The command line, `fastdraft COMMAND`. One file a command."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line; the entry point of the `fastdraft` script.

    Exits with 0 when all went well, 1 when the work failed, 2 when the arguments were wrong.
    """
    # transformers' advice to install PyTorch, which most commands do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from fastdraft.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich", "platformdirs"):
            raise
        sys.exit(
            f"Error: the command line needs {package}, which is not installed: "
            "pip install 'fastdraft[cli]' (or 'fastdraft[demo]' to run models too)"
        )
    app(prog_name="fastdraft")
