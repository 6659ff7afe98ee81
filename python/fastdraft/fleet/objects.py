"""Files below a URL, in whatever store fsspec knows."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fastdraft.errors import DatastoreError, FastdraftError, InvalidValueError
from fastdraft.files import lock

__all__ = ["Objects"]

_PIECE = 1 << 23
_BEGUN = ".tmp"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _as_os_errors(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Has errors that the library of a store has of its own, as for no connection, be OSErrors."""

    @functools.wraps(call)
    def wrapped(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return call(*arguments, **options)
        except (FastdraftError, OSError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return wrapped


class Objects:
    """Files below a URL. Each is written at once and never changed. Thread-safe.

    Names are relative, with slashes. What a store raises comes as an OSError.

    Args:
        url: A folder: `s3://bucket/folder`, `gs://...`, `file:///folder`, or a path.

    Raises:
        InvalidValueError: No file system of fsspec has such a URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        import fsspec

        try:
            # What others wrote has to be seen at once, so listings are not kept.
            self._files, root = fsspec.core.url_to_fs(
                os.fspath(url), use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise InvalidValueError(f"cannot use the URL {url!r}: {error}") from error
        self._root = root.rstrip("/")
        protocols = self._files.protocol
        self._local = "file" in ([protocols] if isinstance(protocols, str) else protocols)

    @_as_os_errors
    def find(self, folder: str) -> dict[str, int]:
        """The names of all files below a folder, and their bytes; nothing where it is not there."""
        try:
            found: dict[str, Any] = self._files.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        first = len(self._root) + 1
        return {
            path[first:]: int(info.get("size") or 0)
            for path, info in found.items()
            if path.startswith(f"{self._path(folder)}/")
        }

    @_as_os_errors
    def folders(self) -> list[str]:
        """The names of the folders at the top."""
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(
            each["name"].rstrip("/").rpartition("/")[2]
            for each in found
            if each["type"] == "directory"
        )

    @_as_os_errors
    def read(self, name: str, most: int) -> bytes:
        """A file of at most `most` bytes. Raises DatastoreError for a longer one."""
        content: bytes = self._files.cat_file(self._path(name), start=0, end=most + 1)
        if len(content) > most:
            raise DatastoreError(f"{name} must have at most {most} bytes")
        return content

    @_as_os_errors
    def fetch(self, name: str, size: int, path: Path) -> str:
        """Copies a file of `size` bytes to a new local one, mode 0600.

        Returns the SHA-256 of its content. Raises DatastoreError where the size differs.
        """
        total = 0
        content = hashlib.sha256()
        with _new(path) as out:
            while total < size:
                last = min(total + _PIECE, size)
                piece = self._files.cat_file(self._path(name), start=total, end=last)
                if len(piece) != last - total:
                    raise DatastoreError(f"{name} must have {size} bytes, got {total + len(piece)}")
                content.update(piece)
                out.write(piece)
                total = last
        return content.hexdigest()

    @_as_os_errors
    def put(self, name: str, path: Path) -> None:
        """Copies a local file to a name that is its content's own."""
        if not self._local:
            self._files.put_file(os.fspath(path), self._path(name))
            return
        with self._beside(name) as (begun, out), path.open("rb") as source:
            shutil.copyfileobj(source, out)
            out.flush()
            os.fsync(out.fileno())
            os.replace(begun, self._path(name))

    @_as_os_errors
    def create(self, name: str, content: bytes) -> bool:
        """Writes a file if there is none of its name, and returns whether it did.

        Of two at once one succeeds: on S3, GCS and local disks, and where else the store has such a
        write. On others both may, and the last one stays.
        """
        if not self._local:
            try:
                self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True
        with self._beside(name) as (begun, out):
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            try:
                os.link(begun, self._path(name))
            except FileExistsError:
                return False
            return True

    @_as_os_errors
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_begun(self) -> None:
        """Removes what killed processes had begun to write to a local folder."""
        if not self._local:
            return
        for begun in Path(self._root).rglob(f"*{_BEGUN}"):
            with contextlib.suppress(OSError):
                held = lock(begun, os.O_RDWR)
                if held is not None:
                    begun.unlink(missing_ok=True)
                    os.close(held)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _beside(self, name: str) -> Any:
        """A new file of a temporary name in a local file's folder, which is made."""
        folder = Path(self._path(name)).parent
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
        begun, out, held = _begin(folder)
        try:
            with out:
                yield begun, out
        finally:
            begun.unlink(missing_ok=True)
            if held is not None:
                os.close(held)


def _begin(folder: Path) -> tuple[Path, Any, int | None]:
    """A new file of a temporary name, to write to, and its lock, which `remove_begun` respects."""
    while True:
        begun = folder / f"{secrets.token_hex(8)}{_BEGUN}"
        out = _new(begun)
        try:
            held = lock(begun, os.O_RDWR)
        except (BlockingIOError, FileNotFoundError):
            held = -1
        if held is None or (held >= 0 and begun.exists()):
            return begun, out, held
        # Another process took it for a killed one's before it had its lock.
        out.close()
        if held >= 0:
            os.close(held)


def _new(path: Path) -> Any:
    """A new file for its owner alone, to write to."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
