"""The line of `fastdraft doctor` on a host, in the environment that the tests run in.

As a script it is that command.
"""

from __future__ import annotations

import sys

__all__ = ["line_of"]


def line_of(title: str, output: str) -> str:
    """The line of a host in the command's output."""
    [line] = [line for line in output.splitlines() if line.startswith(title)]
    return " ".join(line.removeprefix(title).split())


if __name__ == "__main__":
    from fastdraft.cli import main

    sys.argv[1:] = ["doctor"]
    main()
