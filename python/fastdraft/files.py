"""Folders on this machine: of what can be made anew, and ones that outlast no process for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["TemporaryFolder", "cache_directory"]


class TemporaryFolder:
    """A new folder for this user alone, mode 0700, which `close` removes.

    A process that was killed leaves its folders behind; the next one that makes a folder of the
    same prefix and parent removes them. It knows a dead process's folder by its lock, which
    the system releases. On disks without such locks, as some network disks, it stays.

    Args:
        prefix: What its name begins with. It must be used for such folders only.
        parent: Where to make it; by default where the system keeps temporary files.

    Raises:
        OSError: It cannot be made.

    Attributes:
        path: The folder.
    """

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None) -> None:
        folder = Path(tempfile.gettempdir() if parent is None else parent)
        for other in folder.glob(f"{prefix}*"):
            _remove_dead(other)
        self._maker = os.getpid()
        # Until it is locked, another process may take it for a dead one's.
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            try:
                self._lock = _locked(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue
            if self.path.exists():
                break
            self._unlock()

    def close(self) -> None:
        """Removes the folder and all in it; does nothing in a fork of the process that made it."""
        if os.getpid() == self._maker:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        held, self._lock = self._lock, None
        if held is not None:
            os.close(held)


def cache_directory() -> Path:
    """The folder of what can be made anew: `FASTDRAFT_CACHE`, else in the user's cache."""
    if folder := os.environ.get("FASTDRAFT_CACHE"):
        return Path(folder)
    try:
        import platformdirs
    except ImportError:  # no server needs it
        return Path("~/.cache/fastdraft").expanduser()
    return Path(platformdirs.user_cache_dir("fastdraft"))


def _locked(folder: Path) -> int | None:
    """Locks a folder for this process, until it closes the descriptor or ends.

    Returns:
        The descriptor; None on a disk without such locks.

    Raises:
        BlockingIOError: Another process has the lock.
        OSError: It cannot be opened, or is no folder: in /tmp anybody may have put anything there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_dead(folder: Path) -> None:
    try:
        held = _locked(folder)
    except OSError:
        return  # in use, another user's, or gone
    if held is not None:
        if os.fstat(held).st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
