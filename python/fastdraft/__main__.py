"""`python -m fastdraft`, for when the `fastdraft` script is not on the path."""

from __future__ import annotations

from fastdraft.cli import main

main()
