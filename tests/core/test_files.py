"""Temporary folders: nobody else's while their process lives, and nobody's for long afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastdraft.files import TemporaryFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders")

KILLED = """
import os, sys
from fastdraft.files import TemporaryFolder
folder = TemporaryFolder("test-", sys.argv[1])
(folder.path / "file").write_bytes(b"text")
os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_killed_process_goes_with_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    [left] = tmp_path.glob("test-*/file")
    (tmp_path / "other-1").mkdir()
    with TemporaryFolder("test-", tmp_path) as first, TemporaryFolder("test-", tmp_path) as second:
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
        assert sorted(tmp_path.glob("test-*")) == sorted([first.path, second.path])
    assert not left.exists() and [path.name for path in tmp_path.iterdir()] == ["other-1"]


def test_folders_that_are_made_at_once_stay(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def make() -> None:
        try:
            for number in range(200):
                with TemporaryFolder("test-", tmp_path) as folder:
                    (folder.path / "file").write_text(str(number))
                    assert (folder.path / "file").read_text() == str(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not list(tmp_path.iterdir())


def test_a_fork_leaves_the_folder_alone(tmp_path: Path) -> None:
    folder = TemporaryFolder("test-", tmp_path)
    # As a fork sees it.
    folder._maker = os.getpid() + 1
    folder.close()
    assert folder.path.exists()
