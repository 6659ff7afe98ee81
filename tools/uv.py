"""Runs uv with the settings of pip that concern it: `python tools/uv.py pip install ...`.

uv installs what make needs in a fifth of the time. Where to look, and by whose certificates, is set
for pip: in its files, or in variables such as PIP_INDEX_URL. A variable of uv's own wins.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

# By pip's option: uv's variable, and how it separates values.
VARIABLES = {
    "build-constraint": ("UV_BUILD_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", None),
    "constraint": ("UV_CONSTRAINT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", None),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", None),
    "proxy": ("ALL_PROXY", None),
    "timeout": ("UV_HTTP_TIMEOUT", None),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
# The later one wins.
SECTIONS = ("global", "install", ":env:")


def settings() -> dict[str, str]:
    """What pip is configured with, by option."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.check_output(command, text=True).splitlines()
    found: dict[str, str] = {}
    for section in SECTIONS:
        for line in lines:
            key, _, value = line.partition("=")
            where, _, option = key.rpartition(".")
            if where == section:
                found[option] = str(ast.literal_eval(value))
    return found


def main() -> int:
    pip = settings()
    # As pip: the best version of all indexes, for this Python.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON": sys.executable}
    for option, (variable, separator) in VARIABLES.items():
        if option in pip:
            value = pip[option]
            variables[variable] = separator.join(value.split()) if separator else value
    command = [sys.executable, "-m", "uv", *sys.argv[1:]]
    if pip.get("no-index", "").lower() in {"1", "on", "true", "yes"}:
        command.append("--no-index")
    return subprocess.run(command, env=variables | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
