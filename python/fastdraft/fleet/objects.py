"""Objects below a URL: a local folder, or whatever store fsspec knows."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fastdraft.errors import DatastoreError, FastdraftError, InvalidValueError
from fastdraft.files import TemporaryFolder

__all__ = ["Objects"]

# In a local group's folder: what is being written.
_BEGUN = "begun-"


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Has errors that the library of a store has of its own, as for no connection, be OSErrors."""
    try:
        yield
    except (FastdraftError, OSError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def Objects(url: str | os.PathLike[str]) -> LocalObjects | RemoteObjects:  # noqa: N802
    """The objects below `s3://bucket/folder`, `gs://...`, `file:///folder`, or a path.

    Raises InvalidValueError where no file system of fsspec has such a URL.
    """
    path = os.fspath(url)
    if "://" not in path or path.startswith("file://"):
        return LocalObjects(Path(path.removeprefix("file://")))
    return RemoteObjects(path)


class RemoteObjects:
    """Objects in a store of fsspec. Each is written atomically and never changed. Thread-safe.

    Names are relative, with slashes. What a store raises comes as an OSError.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            # What others wrote has to be seen immediately, so listings are not kept.
            self._files, root = fsspec.core.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise InvalidValueError(f"cannot use the URL {url!r}: {error}") from error
        self._root = root.rstrip("/")

    @_as_os_errors()
    def ls(self, folder: str = "") -> dict[str, int | None]:
        """The names in a folder of objects, and their sizes, or at the top, and None for folders.

        Nothing where it is not there.
        """
        path = f"{self._root}/{folder}"
        try:
            # To find what is below is one call, to list a folder several.
            found = (
                self._files.find(path, detail=True).values()
                if folder
                else self._files.ls(path, detail=True)
            )
        except FileNotFoundError:
            return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: (
                int(each.get("size") or 0) if each["type"] == "file" else None
            )
            for each in found
        }

    @_as_os_errors()
    def read(self, name: str, first: int, last: int) -> bytes:
        """The bytes from `first` to `last`, of which there is at least one; fewer at the end."""
        path = f"{self._root}/{name}"
        try:
            content: bytes = self._files.cat_file(path, start=first, end=last)
        except FileNotFoundError:
            raise
        except Exception:
            # S3 refuses a range in which there is nothing.
            if self._files.size(path) > first:
                raise
            return b""
        return content

    @_as_os_errors()
    def write(self, name: str, content: bytes) -> bool:
        """Writes an object if there is none of its name, and returns whether it did.

        Of two concurrent calls one succeeds: on S3, GCS and local disks, and where else the store
        has such a write. On others both may, and the last one stays.
        """
        try:
            self._files.pipe_file(f"{self._root}/{name}", content, mode="create")
        except FileExistsError:
            return False
        return True

    @_as_os_errors()
    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


class LocalObjects:
    """Objects in a folder of this machine, for its owner alone; see `RemoteObjects`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def ls(self, folder: str = "") -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = None
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def read(self, name: str, first: int, last: int) -> bytes:
        # A FIFO would wait for somebody who writes to it.
        file = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(file, "rb") as content:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise DatastoreError(f"{name} is no file")
            content.seek(first)
            return content.read(last - first)

    def write(self, name: str, content: bytes) -> bool:
        path = self._root / name
        for folder in reversed((path.parent, *path.parent.parents)):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        # In a folder that the next process removes if this one is killed.
        with TemporaryFolder(_BEGUN, self._root / name.partition("/")[0]) as begun:
            whole = begun.path / "content"
            with open(os.open(whole, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            try:
                os.link(whole, path)
            except FileExistsError:
                return False
        # The name, too, has to be on the disk.
        with contextlib.suppress(OSError):
            parent = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
        return True

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)
