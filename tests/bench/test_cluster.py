"""What is measured of a build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cluster


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_command_alone(tmp_path: Path) -> None:
    # The system gives a new process the peak of the one that starts it.
    had = b"x" * (400 << 20)
    del had
    row = cluster.measure(cluster.write_ids(tmp_path, 100_000), tmp_path / "out.fds", None, 0)
    assert row["tokens"] == 96_000  # whole documents, of 16 files
    assert 10 << 20 < row["command_peak_rss_bytes"] < 300 << 20
