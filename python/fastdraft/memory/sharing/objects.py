"""Sealed objects below a URL: what is read of them has the operator's MAC."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import struct
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

from fastdraft.errors import DatastoreError, InvalidValueError

__all__ = ["BEGUN", "NO_TOMBSTONE", "TOMBSTONE", "Head", "Objects", "Piece", "digest", "secret_of"]

TOMBSTONE: Final = "forgotten"
"""The name of a namespace's tombstone."""
NO_TOMBSTONE: Final = bytes(16)
BEGUN: Final = ".begun"
"""How the name of a file ends that is being written in a local folder."""

_FORMAT: Final = 5
_MAGIC: Final = b"fdmem 5\n"
_HEAD: Final = struct.Struct("<8s16sQQd32s32s")
_PIECE: Final = struct.Struct("<QQQ")
_MOST_BYTES: Final = 1 << 30  # of an object
_AHEAD: Final = 1 << 16  # read before anything is known of an object
_LEAST_KEY: Final = 16
_ATTEMPTS: Final = 4
_PAUSE = 0.01  # in seconds, after the first

_Result = TypeVar("_Result")


class Head(NamedTuple):
    """The head of an object whose MAC was checked."""

    tombstone: bytes
    """The id of the tombstone that its writer had seen; of a tombstone, its own."""
    size: int
    """The bytes after the head."""
    tokens: int
    time: float
    """When it was written, in seconds since 1970, by its writer's clock."""
    sha: bytes


class Piece(NamedTuple):
    """Text that a replica published at once. Joined objects hold several."""

    number: int
    tokens: int
    content: bytes

    def sealed(self) -> bytes:
        """The piece in an object's body."""
        return _PIECE.pack(self.number, self.tokens, len(self.content)) + self.content

    @staticmethod
    def parse(body: bytes) -> Iterator[Piece]:
        """The pieces of a verified body."""
        at = 0
        while at < len(body):
            number, tokens, size = _PIECE.unpack_from(body, at)
            at += _PIECE.size + size
            yield Piece(number, tokens, body[at - size : at])


class Objects:
    """The objects below a URL of fsspec's, such as `s3://bucket/folder`, or a local folder.

    Each call is tried up to four times. Thread-safe. What a store raises comes as an OSError.

    Raises:
        InvalidValueError: No file system of fsspec has such a URL, or the key is too short.
    """

    def __init__(self, url: str | os.PathLike[str], key: bytes | str) -> None:
        self.secret = secret_of(key)
        try:
            import fsspec

            # Others' objects have to be seen immediately, so listings are not kept.
            self._files, root = fsspec.core.url_to_fs(
                os.fspath(url), use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise InvalidValueError(f"cannot use the URL {url!r}: {error}") from error
        self._root = root.rstrip("/")
        self._is_local = "file" in self._files.protocol

    def group_of(self, model: str, fingerprint: bytes | None) -> str:
        """The name of a model with its tokenizer in paths."""
        return digest(self.secret, "fleet", _FORMAT, model, fingerprint)

    def id_of(self, group: str, namespace: Hashable) -> str:
        """The name of a namespace in paths. Raises InvalidValueError for one that is no data."""
        return digest(self.secret, "namespace", group, namespace)

    def ls(self, folder: str = "") -> dict[str, bool]:
        """The names in a folder, and whether each is an object; nothing where it is not there."""

        def listed() -> dict[str, bool]:
            try:
                found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            named = {each["name"].rstrip("/").rpartition("/")[2]: each["type"] for each in found}
            return {name: kind == "file" for name, kind in named.items() if kind != "other"}

        return _tried(listed)

    def read(self, path: str, *, whole: bool = True) -> tuple[Head, bytes]:
        """An object's head and what follows it, both verified; no more than 64 KiB are read of one
        whose MAC is wrong.

        Args:
            path: GROUP/NAMESPACE/NAME.
            whole: Without, what follows a head may be left out.

        Raises:
            FileNotFoundError: It is not there.
            DatastoreError: It is damaged, incomplete, or not of this key and path.
            OSError: The store failed.
        """

        def once() -> tuple[Head, bytes]:
            content = self._part(path, 0, _AHEAD)
            if len(content) < _HEAD.size:
                raise DatastoreError(f"{path} ends within its head")
            magic, *fields, mac = _HEAD.unpack_from(content)
            head = Head(*fields)
            right = hmac.compare_digest(mac, self._mac(path, content[: _HEAD.size - len(mac)]))
            if magic != _MAGIC or not right or head.size > _MOST_BYTES:
                raise DatastoreError(f"{path} is damaged, or not of this key and path")
            end = _HEAD.size + head.size
            if whole and len(content) < end:
                content += self._part(path, len(content), end)
            body = content[_HEAD.size : end]
            if hashlib.sha256(body).digest() == head.sha:
                return head, body
            if whole:
                raise DatastoreError(f"{path} is damaged or incomplete")
            return head, b""

        return _tried(once)

    def seal(self, path: str, tombstone: bytes, body: bytes, tokens: int) -> bytes:
        """The content of an object."""
        sha = hashlib.sha256(body).digest()
        fields = (_MAGIC, tombstone, len(body), tokens, time.time(), sha)
        head = _HEAD.pack(*fields, bytes(32))[:-32]
        return head + self._mac(path, head) + body

    def write(self, path: str, content: bytes) -> None:
        """Writes a sealed object. Another write of the same content changes nothing."""
        full = f"{self._root}/{path}"

        def once() -> None:
            if not self._is_local:
                self._files.pipe_file(full, content)
                return
            for folder in (f"{self._root}/{path.partition('/')[0]}", os.path.dirname(full)):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            begun = f"{full}{BEGUN}"
            file = os.open(begun, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(begun, full)

        _tried(once)

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""

        def once() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{path}")

        _tried(once)

    def tombstone(self, folder: str) -> Head | None:
        """The tombstone of a namespace; None where there is none. Raises as `read`."""
        try:
            return self.read(f"{folder}/{TOMBSTONE}")[0]
        except FileNotFoundError:
            return None

    def forget(self, group: str, name: str) -> bool:
        """Removes all text of a namespace, by what stands for it.

        Returns whether anything, if only a tombstone, was there; else it does nothing.

        When this returns, nothing but a tombstone is there. Replicas that follow the namespace
        drop what they have of it with their next look, and publish no text from before it.

        Raises:
            DatastoreError: Something is there still, or was added meanwhile: forget again.
            OSError: The store failed.
        """
        folder = f"{group}/{name}"
        if not self.ls(folder):
            return False
        path = f"{folder}/{TOMBSTONE}"
        content = self.seal(path, os.urandom(16), b"", 0)
        self.write(path, content)
        if self.read(path)[0].tombstone != content[len(_MAGIC) :][:16]:
            raise DatastoreError("another process forgets the same namespace: forget again")
        for other in self.ls(folder).keys() - {TOMBSTONE}:
            self.remove(f"{folder}/{other}")
        if left := self.ls(folder).keys() - {TOMBSTONE}:
            raise DatastoreError(f"{len(left)} objects of the namespace are there still")
        return True

    def _part(self, path: str, first: int, last: int) -> bytes:
        full = f"{self._root}/{path}"
        try:
            content: bytes = self._files.cat_file(full, start=first, end=last)
        except FileNotFoundError:
            raise
        except Exception:
            # S3 refuses a range in which there is nothing.
            if self._files.size(full) > first:
                raise
            return b""
        return content

    def _mac(self, path: str, head: bytes) -> bytes:
        text = json.dumps(["object", *path.split("/")[-3:]]).encode()
        return hmac.digest(self.secret, text + b"\n" + head, "sha256")


def _tried(call: Callable[[], _Result]) -> _Result:
    """Calls until it succeeds, a few times at most. All calls may be repeated."""
    for attempt in range(_ATTEMPTS):
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            if attempt + 1 < _ATTEMPTS:
                time.sleep(random.random() * _PAUSE * 4**attempt)
                continue
            if isinstance(error, (DatastoreError, OSError)):
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error
    raise AssertionError


def secret_of(key: bytes | str) -> bytes:
    """The operator's key as bytes. Raises InvalidValueError where it is too short."""
    secret = key.encode() if isinstance(key, str) else bytes(key)
    if len(secret) < _LEAST_KEY:
        raise InvalidValueError(f"key must have at least {_LEAST_KEY} bytes, got {len(secret)}")
    return secret


def digest(secret: bytes, *parts: Hashable) -> str:
    """The HMAC-SHA-256 of names, 64 hexadecimal digits. Raises InvalidValueError for a name that
    is no data."""
    text = json.dumps([_plain(part) for part in parts], ensure_ascii=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _plain(name: Hashable) -> Any:
    """A namespace's name as data that JSON keeps apart."""
    if name is None or isinstance(name, (str, int)):
        return name
    if isinstance(name, bytes):
        return {"bytes": name.hex()}
    if isinstance(name, tuple):
        return [_plain(part) for part in name]
    raise InvalidValueError(
        "a namespace that is shared must be a text, a number, bytes, or a tuple of these, got "
        f"{name!r}"
    )
