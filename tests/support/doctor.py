"""What `fastdraft doctor` says of a host, in the environment that the tests run in."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["doctor"]


def doctor(title: str, **variables: str) -> tuple[int, str]:
    """The exit code, and the line of a host; variables: of the environment."""
    done = subprocess.run(
        [sys.executable, "-m", "fastdraft.cli", "doctor"],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    [line] = [line for line in done.stdout.splitlines() if line.startswith(title)]
    return done.returncode, " ".join(line.removeprefix(title).split())
