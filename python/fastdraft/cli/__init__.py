"""The command line, `fastdraft COMMAND`. One file a command."""

from __future__ import annotations

import os
import sys

import fastdraft

__all__ = ["main"]


def main() -> None:
    """Runs the command line; the entry point of the `fastdraft` script.

    Exits with 0 when all went well, 1 when the work failed, 2 when the arguments were wrong, 130
    after Ctrl-C. Without the packages of the extra `cli`, `doctor` and `--version` work.
    """
    # transformers' advice to install PyTorch, which most commands do not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from fastdraft.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "jmespath", "platformdirs", "rich"):
            raise
        if sys.argv[1:] == ["doctor"]:
            from fastdraft.cli.doctor import check

            sys.exit(check())
        if sys.argv[1:] == ["--version"]:
            print(f"fastdraft, version {fastdraft.__version__}")
            return
        sys.exit(
            f"Error: this command needs {package}, which is not installed: "
            "pip install 'fastdraft[cli]' (or 'fastdraft[demo]' to run models too)"
        )
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="fastdraft")
