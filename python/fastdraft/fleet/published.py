"""What is published of one model: the manifest, stores and segments, and how they are checked."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastdraft.datastore import Datastore
from fastdraft.errors import DatastoreError
from fastdraft.files import sha256
from fastdraft.fleet.objects import Objects
from fastdraft.memory_folder import digest

__all__ = ["Entry", "Latest", "Manifest", "Published", "Segment", "StoreFile", "groups"]

FORMAT = 1
TEMPORARY = "fastdraft-fleet-"
"""What the names of temporary folders begin with."""
_MOST_MANIFEST = 1 << 26
_MOST_FILE = 1 << 40
_MOST_NUMBER = 10**20
# Manifests before the last that stay, for people to look at.
_MANIFESTS = 8

_ID = re.compile("[0-9a-f]{64}", re.ASCII)
_STORE = re.compile("([0-9]{20})-([0-9a-f]{16})-([0-9a-f]{64})[.]fds", re.ASCII)
_SEGMENT = re.compile("([0-9a-f]{16})-([0-9]{20})-([0-9]{20})-([0-9a-f]{64})[.]fds", re.ASCII)
_MANIFEST = re.compile("([0-9]{20})[.]json", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A frozen store of a namespace."""

    file: str
    """Its name: the number of the manifest that it was built for, its builder, and its MAC."""
    bytes: int
    tokens: int

    @property
    def number(self) -> int:
        return int(self.file[:20])


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a replica with what its requests of a namespace said."""

    replica: str
    sequence: int
    seen: int
    """The number of the manifest that the replica followed."""
    file: str
    bytes: int

    @property
    def order(self) -> tuple[int, str, int]:
        """Older text first, as far as numbers tell: a replica's own always, of several replicas
        what was said between two other manifests."""
        return self.seen, self.replica, self.sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """What there is of a namespace."""

    stores: tuple[StoreFile, ...] = ()
    """Older text first."""
    segments: tuple[str, ...] = ()
    """Files of segments that are in the stores, and may still be there."""
    written: int = 0
    """The number of the manifest in which its text changed last."""
    pinned: bool = False
    """Whether it stays when there is too much."""

    @property
    def bytes(self) -> int:
        return sum(store.bytes for store in self.stores)

    @property
    def tokens(self) -> int:
        return sum(store.tokens for store in self.stores)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which stores there are, by namespace."""

    number: int = 0
    """0 stands for the one before the first."""
    namespaces: Mapping[str, Entry] = field(default_factory=dict)
    forgotten: Mapping[str, int] = field(default_factory=dict)
    """Namespaces that were forgotten, and by which manifest: text that was said before is of no
    use."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.namespaces.values())


class Latest(NamedTuple):
    """The last manifest, and what was seen on the way to it."""

    manifest: Manifest | None
    free: int
    """The first number after it that no file has."""
    wrong: list[Exception]
    """What is wrong with those of greater numbers."""


class Published:
    """What is published of one model under a URL. Thread-safe.

    Args:
        objects: The files below the URL.
        secret: The operator's key.
        group: Stands for the model and its tokenizer: see `group_of`.
    """

    def __init__(self, objects: Objects, secret: bytes, group: str) -> None:
        self.group = group
        self._objects = objects
        self._secret = secret

    @classmethod
    def of(
        cls, objects: Objects, secret: bytes, model: str, fingerprint: bytes | None
    ) -> Published:
        """That of a model, whose tokenizer has a fingerprint."""
        return cls(objects, secret, digest(secret, "fleet", model, fingerprint))

    def id_of(self, namespace: Hashable) -> str:
        """What stands for a namespace. Raises InvalidValueError for a name that is no data."""
        return digest(self._secret, "namespace", self.group, namespace)

    # --- The manifest ---

    def numbers(self) -> list[int]:
        """The numbers of all files that are called as manifests are, the greatest first."""
        names = self._objects.find(f"{self.group}/manifests")
        found = (_MANIFEST.fullmatch(name.rpartition("/")[2]) for name in names)
        return sorted((int(each[1]) for each in found if each), reverse=True)

    def latest(self, after: int = 0) -> Latest:
        """The last sound manifest whose number is greater than `after`. Raises OSError."""
        numbers = self.numbers()
        wrong: list[Exception] = []
        found = None
        for number in numbers:
            if number <= after:
                break
            try:
                content = self._objects.read(self._manifest_name(number), _MOST_MANIFEST)
                found = self._parse(number, content)
                break
            except FileNotFoundError:
                continue  # removed meanwhile: there is a later one
            except DatastoreError as error:
                wrong.append(error)
        # Damaged and foreign ones keep their numbers.
        free = 1 + (after if found is None else found.number)
        while free in numbers:
            free += 1
        return Latest(found, free, wrong)

    def write(self, manifest: Manifest) -> bool:
        """Publishes a manifest; whether it has its number, and no other manifest does."""
        content = {
            "format": FORMAT,
            "number": manifest.number,
            "namespaces": {
                name: {
                    "stores": [[each.file, each.bytes, each.tokens] for each in entry.stores],
                    "segments": list(entry.segments),
                    "written": entry.written,
                    "pinned": entry.pinned,
                }
                for name, entry in sorted(manifest.namespaces.items())
            },
            "forgotten": dict(sorted(manifest.forgotten.items())),
        }
        body = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        text = f"{body}\n{self._manifest_mac(manifest.number, body)}\n".encode()
        name = self._manifest_name(manifest.number)
        if self._objects.create(name, text):
            return True
        # The store's client may have tried twice, and found its own.
        try:
            return self._objects.read(name, _MOST_MANIFEST) == text
        except FileNotFoundError:
            return False

    def remove_old_manifests(self, last: int) -> None:
        """Removes those long before the one of number `last`."""
        for number in self.numbers():
            if number <= last - _MANIFESTS:
                self._objects.remove(self._manifest_name(number))

    def _manifest_name(self, number: int) -> str:
        return f"{self.group}/manifests/{number:020d}.json"

    def _manifest_mac(self, number: int, body: str) -> str:
        content = hashlib.sha256(body.encode()).hexdigest()
        return digest(self._secret, "manifest", self.group, number, content)

    def _parse(self, number: int, content: bytes) -> Manifest:
        """Checks a manifest, and takes nothing in it on trust. Raises DatastoreError."""
        try:
            body, mac, end = content.decode("ascii").split("\n")
        except ValueError as error:
            raise DatastoreError(f"manifest {number} is no manifest: {error}") from error
        if end or not hmac.compare_digest(mac, self._manifest_mac(number, body)):
            raise DatastoreError(f"manifest {number} is not of this key, group and number")
        try:
            return _manifest(number, json.loads(body))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DatastoreError(f"manifest {number} is no manifest: {error!r}") from error

    # --- Stores and segments ---

    def segments(self) -> dict[str, list[Segment]]:
        """All files that are called as segments are, by namespace, in their order."""
        found: dict[str, list[Segment]] = {}
        for name, size in self._objects.find(f"{self.group}/segments").items():
            _, _, namespace, file = _parts(name, 4)
            match = _SEGMENT.fullmatch(file)
            if match and _ID.fullmatch(namespace) and size <= _MOST_FILE:
                segment = Segment(match[1], int(match[2]), int(match[3]), file, size)
                found.setdefault(namespace, []).append(segment)
        for each in found.values():
            each.sort(key=lambda segment: segment.order)
        return found

    def stores(self) -> dict[str, dict[str, int]]:
        """All files that are called as stores are, and their bytes, by namespace."""
        found: dict[str, dict[str, int]] = {}
        for name, size in self._objects.find(f"{self.group}/stores").items():
            _, _, namespace, file = _parts(name, 4)
            if _STORE.fullmatch(file) and _ID.fullmatch(namespace):
                found.setdefault(namespace, {})[file] = size
        return found

    def put_segment(
        self, namespace: str, replica: str, sequence: int, seen: int, path: Path
    ) -> Segment:
        """Publishes a file as a segment. When this returns it is there."""
        mac = self._segment_mac(namespace, replica, sequence, seen, sha256(path))
        file = f"{replica}-{sequence:020d}-{seen:020d}-{mac}.fds"
        self._objects.put(f"{self.group}/segments/{namespace}/{file}", path)
        return Segment(replica, sequence, seen, file, path.stat().st_size)

    def put_store(
        self, namespace: str, number: int, builder: str, path: Path, tokens: int
    ) -> StoreFile:
        """Uploads a file as a store for the manifest of a number."""
        mac = self._store_mac(namespace, number, builder, sha256(path))
        file = f"{number:020d}-{builder}-{mac}.fds"
        self._objects.put(f"{self.group}/stores/{namespace}/{file}", path)
        return StoreFile(file, path.stat().st_size, tokens)

    def open_segment(self, namespace: str, segment: Segment, folder: Path) -> Datastore:
        """Fetches and checks a segment. Raises DatastoreError where it is damaged or foreign."""
        path = folder / segment.file
        with _removed(path):
            name = f"{self.group}/segments/{namespace}/{segment.file}"
            content = self._objects.fetch(name, segment.bytes, path)
            mac = self._segment_mac(
                namespace, segment.replica, segment.sequence, segment.seen, content
            )
            return _open(name, path, segment.file[-68:-4], mac)

    def open_store(self, namespace: str, store: StoreFile, folder: Path) -> Datastore:
        """Fetches and checks a store. Raises DatastoreError where it is damaged or foreign."""
        path = folder / store.file
        with _removed(path):
            name = f"{self.group}/stores/{namespace}/{store.file}"
            content = self._objects.fetch(name, store.bytes, path)
            mac = self._store_mac(namespace, store.number, store.file[21:37], content)
            return _open(name, path, store.file[-68:-4], mac)

    def remove_segment(self, namespace: str, file: str) -> None:
        self._objects.remove(f"{self.group}/segments/{namespace}/{file}")

    def remove_store(self, namespace: str, file: str) -> None:
        self._objects.remove(f"{self.group}/stores/{namespace}/{file}")

    def remove_begun(self) -> None:
        """Removes what killed replicas and builders had begun to write, where these are files."""
        self._objects.remove_begun()

    def _segment_mac(
        self, namespace: str, replica: str, sequence: int, seen: int, content: str
    ) -> str:
        place = (self.group, namespace, replica, sequence, seen)
        return digest(self._secret, "segment", *place, content)

    def _store_mac(self, namespace: str, number: int, builder: str, content: str) -> str:
        return digest(self._secret, "store", self.group, namespace, number, builder, content)


def groups(objects: Objects, secret: bytes) -> list[Published]:
    """What is published under a URL, of each model."""
    return [Published(objects, secret, name) for name in objects.folders() if _ID.fullmatch(name)]


def _manifest(number: int, value: Any) -> Manifest:
    """A manifest from JSON.

    Raises AttributeError, KeyError, TypeError or ValueError where it has another form.
    """
    if value["format"] != FORMAT or value["number"] != number:
        raise ValueError(f"format {value['format']!r}, number {value['number']!r}")
    namespaces = {_checked(_ID, name): _entry(each) for name, each in value["namespaces"].items()}
    forgotten = {
        _checked(_ID, name): _count(each, _MOST_NUMBER) for name, each in value["forgotten"].items()
    }
    return Manifest(number, namespaces, forgotten)


def _entry(value: Any) -> Entry:
    if not isinstance(value["pinned"], bool):
        raise TypeError(f"pinned {value['pinned']!r}")
    stores = [
        StoreFile(_checked(_STORE, file), _count(size, _MOST_FILE), _count(tokens, _MOST_FILE))
        for file, size, tokens in value["stores"]
    ]
    return Entry(
        stores=tuple(stores),
        segments=tuple(_checked(_SEGMENT, file) for file in value["segments"]),
        written=_count(value["written"], _MOST_NUMBER),
        pinned=value["pinned"],
    )


def _checked(form: re.Pattern[str], value: Any) -> str:
    """A name of that form: no other can leave its folder."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"the name {value!r}")
    return value


def _count(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"the number {value!r}")
    return value


def _parts(name: str, count: int) -> list[str]:
    parts = name.split("/")
    return parts if len(parts) == count else [""] * count


def _open(name: str, path: Path, expected: str, mac: str) -> Datastore:
    if not hmac.compare_digest(expected, mac):
        raise DatastoreError(f"{name} is damaged, or not of this key and place")
    return Datastore.open(path, verify=True)


@contextlib.contextmanager
def _removed(path: Path) -> Any:
    """Leaves no file at a path: what was mapped of it lasts as long as the mapping does."""
    try:
        yield
    finally:
        # Windows keeps what is mapped.
        with contextlib.suppress(OSError):
            path.unlink()
