"""Temporary folders: nobody else's while their process lives, and nobody's for long afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from fastdraft.files import TemporaryFolder, _locked

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
    first, second = (TemporaryFolder("test-", tmp_path) for _ in range(2))
    with closing(first), closing(second):
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
        assert sorted(tmp_path.glob("test-*")) == sorted([first.path, second.path])
    assert not left.exists() and [path.name for path in tmp_path.iterdir()] == ["other-1"]


def test_folders_that_are_made_at_once_stay(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def make() -> None:
        try:
            for number in range(200):
                with closing(TemporaryFolder("test-", tmp_path)) as folder:
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


def test_what_others_left_in_a_shared_folder_stops_nobody(tmp_path: Path) -> None:
    """Nobody writes to the FIFO: whoever opened it as a file would wait for ever."""
    os.mkfifo(tmp_path / "test-fifo")
    (tmp_path / "test-file").write_text("somebody's")
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("somebody's")
    (tmp_path / "test-link").symlink_to(target)
    made = threading.Event()

    def make() -> None:
        with closing(TemporaryFolder("test-", tmp_path)):
            made.set()

    threading.Thread(target=make, daemon=True).start()
    assert made.wait(10)
    assert (target / "file").exists() and (tmp_path / "test-file").exists()
    for name in ("test-fifo", "test-file", "test-link"):
        with pytest.raises(NotADirectoryError, match=name):
            _locked(tmp_path / name)


def test_folders_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user sees this one's, whose mode may let all write."""
    (tmp_path / "test-other").mkdir()
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: user + 1)
        TemporaryFolder("test-", tmp_path)
    assert (tmp_path / "test-other").exists()
