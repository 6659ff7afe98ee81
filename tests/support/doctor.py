"""The line of `fastdraft doctor` on a host, in the environment that the tests run in.

As a script it is that command.
"""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["doctor", "line_of"]


def doctor(title: str, **variables: str) -> tuple[int, str]:
    """The exit code, and the line of a host; variables: of the environment."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env={**os.environ, **variables}
    )
    return done.returncode, line_of(title, done.stdout)


def line_of(title: str, output: str) -> str:
    """The line of a host in the command's output."""
    [line] = [line for line in output.splitlines() if line.startswith(title)]
    return " ".join(line.removeprefix(title).split())


if __name__ == "__main__":
    from fastdraft.cli import main

    sys.argv[1:] = ["doctor"]
    main()
