"""What is published of one model: objects with text, and the manifest, which says what counts."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.fleet.objects import LocalObjects, RemoteObjects
from fastdraft.fleet.sealed import Chunk, Head, digest, seal

__all__ = ["Manifest", "Pack", "Published", "groups"]

FORMAT = 3
_MOST_MANIFEST = 1 << 26
_MOST_OBJECT = 1 << 40
_MOST_NUMBER = 10**20
# Read of an object at first, to know what it holds.
_AHEAD = 1 << 16
# How many bytes are joined together, and the size from which on a pack is not joined any more.
_MOST_JOINED = 1 << 28
_MOST_PACK = 1 << 26
_LEAST_PACK = 1 << 18
# A pack is written again when this many times fewer bytes come after it.
_GROWTH = 4
# For this many manifests, what was joined stays, for those who are reading it.
HISTORY = 8
# Text that is published this many manifests late is refused, so what was forgotten earlier need not
# be known.
_HORIZON = 1024
_ATTEMPTS = 16

_ID = re.compile("[0-9a-f]{64}", re.ASCII)
_TEXT = re.compile("[0-9]{20}-[0-9]{20}-[0-9a-f]{16}-[0-9a-f]{64}", re.ASCII)
_PACK = re.compile("[0-9]{20}-[0-9a-f]{64}", re.ASCII)
_NUMBER = re.compile("[0-9]{20}", re.ASCII)


class Pack(NamedTuple):
    """An object with text: of a replica, `text/SEEN-SEQUENCE-REPLICA-MAC`, or what several of them
    were joined to, `packs/NUMBER-MAC`. Sorted by name, older text comes first: a replica's sequence
    number is greater than those that it has seen."""

    name: str
    size: int

    @property
    def number(self) -> int:
        """Of the manifest that its replica followed, or that it was made for."""
        return int(self.name.partition("/")[2][:20])

    @property
    def replica(self) -> str:
        """Which replica's text it is; nothing of a pack."""
        return self.name.split("-")[2] if self.name.startswith("text/") else ""

    @property
    def sequence(self) -> int:
        """Of a replica's text."""
        return int(self.name.split("-")[1])


class Joined(NamedTuple):
    """What a manifest put others in the place of."""

    number: int
    """The manifest's."""
    sources: tuple[Pack, ...]
    """The objects that the text was in before: of no more use, and removed soon."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which packs there are. It says what is not to be read any more; what it does not name was
    published since."""

    number: int = 0
    """0 stands for the one before the first."""
    packs: tuple[Pack, ...] = ()
    """Older text first."""
    joined: tuple[Joined, ...] = ()
    """Of the last manifests."""
    forgotten: Mapping[str, int] = field(default_factory=dict)
    """Namespaces that were forgotten, and by which manifest: text that was said before is of no
    use."""

    @property
    def bytes(self) -> int:
        return sum(pack.size for pack in self.packs)

    @property
    def sources(self) -> dict[str, Pack]:
        """The objects that are of no more use."""
        return {pack.name: pack for each in self.joined for pack in each.sources}

    @property
    def late(self) -> int:
        """What was published before this manifest may have to be forgotten."""
        return max([*self.forgotten.values(), self.number - _HORIZON])

    def stale(self, text: Pack, namespace: str) -> bool:
        """Whether what a replica said in a namespace is to be forgotten."""
        number = text.number if text.replica else _MOST_NUMBER
        return number < max(self.forgotten.get(namespace, 0), self.number - _HORIZON)


class Published:
    """What is published of one model under a URL.

    An object that is damaged or foreign is read twice, then left out by this instance, and stays as
    it is: another one may be able to read it.

    Args:
        objects: Those below the URL.
        secret: The operator's key.
        group: Stands for the model and its tokenizer.

    Attributes:
        refused: Called with the name and the error of each object that is left out.
    """

    def __init__(self, objects: LocalObjects | RemoteObjects, secret: bytes, group: str) -> None:
        self.group = group
        self.refused: Callable[[str, Exception], None] = lambda *_: None
        self._objects = objects
        self._secret = secret
        self._bad: set[str] = set()

    def id_of(self, namespace: Hashable) -> str:
        """What stands for a namespace. Raises InvalidValueError for a name that is no data."""
        return digest(self._secret, "namespace", self.group, namespace)

    def owned(self) -> bool:
        """Whether something here was written with this key."""
        if self.latest() is not None:
            return True
        return any(self.head(each) is not None for each in self.texts().values())

    # --- Objects with text ---

    def texts(self) -> dict[str, Pack]:
        """What replicas published and was not removed yet, older text first."""
        return dict(sorted(self._ls("text", _TEXT).items()))

    def waiting(self, manifest: Manifest) -> dict[str, Pack]:
        """What was published and is not in a manifest's packs yet, older text first."""
        gone = manifest.sources
        return {name: pack for name, pack in self.texts().items() if name not in gone}

    def put_text(self, replica: str, sequence: int, seen: int, chunks: Mapping[str, Chunk]) -> Pack:
        """Publishes what a replica said in namespaces. When this returns it is there."""
        place = f"text/{seen:020d}-{sequence:020d}-{replica}"
        return self._put(place, {name: [chunk] for name, chunk in chunks.items()})

    def head(self, pack: Pack, ahead: int = _AHEAD) -> Head | None:
        """What a pack holds; None where it is left out. Raises FileNotFoundError.

        Args:
            pack: The pack.
            ahead: How many bytes the first call reads; text among them needs no further call.
        """

        def read() -> Head:
            content = self._read(pack, 0, min(pack.size, ahead))
            size = Head.size_of(content)
            content += self._read(pack, len(content), size)
            place, _, mac = pack.name.rpartition("-")
            if not hmac.compare_digest(mac, self._mac(place, content[:size])):
                raise DatastoreError("it is damaged, or not of this key and place")
            return Head.parse(content, size, pack.size)

        return self._twice(pack.name, read)  # type: ignore[no-any-return]

    def chunk(self, pack: Pack, head: Head, entry: int) -> Chunk | None:
        """An entry of a pack; None where it is left out. Raises FileNotFoundError."""
        first, last = head.span(entry)
        with contextlib.suppress(DatastoreError):
            if last <= len(head.content):
                return head.chunk(entry, head.content[first:last])
        name = f"{pack.name}#{entry}"
        return self._twice(  # type: ignore[no-any-return]
            name, lambda: head.chunk(entry, self._read(pack, first, last))
        )

    def _chunks(self, pack: Pack) -> dict[str, Chunk | None] | None:
        """All that a pack holds by namespace; None where it is left out."""
        head = self.head(pack, pack.size)
        if head is None:
            return None
        return {name: self.chunk(pack, head, entry) for entry, name in enumerate(head.names)}

    def _put(self, place: str, chunks: Mapping[str, Iterable[Chunk]]) -> Pack:
        head, text = seal(chunks)
        name = f"{place}-{self._mac(place, head)}"
        self._objects.write(f"{self.group}/{name}", head + text)
        return Pack(name, len(head) + len(text))

    def _mac(self, place: str, head: bytes) -> str:
        content = hashlib.sha256(head).hexdigest()
        return digest(self._secret, "text", self.group, place, content)

    def _read(self, pack: Pack, first: int, last: int) -> bytes:
        if first >= last:
            return b""
        content = self._objects.read(f"{self.group}/{pack.name}", first, last)
        if len(content) != last - first:
            raise DatastoreError(f"it must have {pack.size} bytes, and ends before {last}")
        return content

    def _twice(self, name: str, read: Callable[[], Any]) -> Any:
        """What `read` returns; None where that fails again, and from then on."""
        if name in self._bad:
            return None
        for attempt in range(2):
            try:
                return read()
            except (DatastoreError, PermissionError) as error:
                if attempt:
                    self._bad.add(name)
                    self.refused(name.partition("#")[0], error)
        return None

    def _ls(self, folder: str, form: re.Pattern[str]) -> dict[str, Pack]:
        return {
            f"{folder}/{name}": Pack(f"{folder}/{name}", size)
            for name, size in self._objects.ls(f"{self.group}/{folder}").items()
            if form.fullmatch(name) and size is not None and 0 < size <= _MOST_OBJECT
        }

    # --- The manifest ---

    def latest(self, after: int = 0) -> Manifest | None:
        """The last sound manifest whose number is greater than `after`. Raises OSError."""
        return self._latest(after)[0]

    def _latest(self, after: int = 0) -> tuple[Manifest | None, int]:
        """And the first number after it that no file has."""
        found = self._objects.ls(f"{self.group}/manifests")
        sizes = {int(name): size for name, size in found.items() if _NUMBER.fullmatch(name)}
        manifest = None
        for number in sorted(sizes, reverse=True):
            if number <= after:
                break
            with contextlib.suppress(FileNotFoundError):  # removed: there is a later one
                manifest = self._manifest(number, sizes[number] or 0)
            if manifest is not None:
                break
        # Damaged and foreign ones keep their numbers.
        free = 1 + (after if manifest is None else manifest.number)
        while free in sizes:
            free += 1
        return manifest, free

    def _manifest(self, number: int, size: int) -> Manifest | None:
        name = f"manifests/{number:020d}"

        def read() -> Manifest:
            if not 0 < size <= _MOST_MANIFEST:
                raise DatastoreError(f"it must have 1 to {_MOST_MANIFEST} bytes, got {size}")
            return self._parse(number, self._read(Pack(name, size), 0, size))

        return self._twice(name, read)  # type: ignore[no-any-return]

    def _write(self, manifest: Manifest) -> bool:
        """Publishes a manifest; whether it has its number, and no other manifest does."""
        content = {
            "format": FORMAT,
            "number": manifest.number,
            "packs": manifest.packs,
            "joined": manifest.joined,
            "forgotten": dict(sorted(manifest.forgotten.items())),
        }
        body = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
        text = f"{body}\n{self._manifest_mac(manifest.number, body)}\n".encode()
        name = f"{self.group}/manifests/{manifest.number:020d}"
        # The store's client may have tried twice, and found its own.
        self._objects.write(name, text)
        with contextlib.suppress(FileNotFoundError):
            return self._objects.read(name, 0, len(text) + 1) == text
        return False

    def _manifest_mac(self, number: int, body: str) -> str:
        content = hashlib.sha256(body.encode()).hexdigest()
        return digest(self._secret, "manifest", self.group, number, content)

    def _parse(self, number: int, content: bytes) -> Manifest:
        """Checks a manifest, and takes nothing in it on trust. Raises DatastoreError."""
        try:
            body, mac, end = content.decode("ascii").split("\n")
        except ValueError as error:
            raise DatastoreError(f"it is no manifest: {error}") from error
        if end or not hmac.compare_digest(mac, self._manifest_mac(number, body)):
            raise DatastoreError("it is not of this key, group and number")
        try:
            return _manifest(number, json.loads(body))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DatastoreError(f"it is no manifest: {error!r}") from error

    # --- Changes ---

    def join(self, max_bytes: int = _MOST_OBJECT) -> Manifest:
        """Puts what replicas have published since, and packs that are small beside it, into a pack.

        Any number of processes may do so concurrently, or be killed. The pack is written first,
        then the manifest that names it, whose number is free for one process alone; another one
        begins anew. What was joined is removed some manifests later; what cannot be read is
        left as it is.

        Args:
            max_bytes: The most bytes of all packs. Beyond it the oldest pack leaves.

        Returns the manifest that says so, or the last one where there was nothing to do. O(text)
        amortised by a factor that grows with the logarithm of all text.

        Raises:
            OSError: The store fails. Nothing is lost.
            DatastoreError: Others were first again and again.
        """

        def attempt(base: Manifest, number: int) -> Manifest:
            most = min(_MOST_PACK, max(_LEAST_PACK, max_bytes // 16))
            texts = list(self.waiting(base).values())
            packs, inputs, joined = list(base.packs), list[Pack](), list[Joined]()
            size = sum(each.size for each in texts)
            while packs and size < most and packs[-1].size <= min(_GROWTH * size, most):
                inputs.insert(0, packs.pop())
                size += inputs[0].size
            made = self._joined(base, number, [*inputs, *texts]) if texts else None
            taken = () if made is None else made[1].sources
            packs += [each for each in inputs if each not in taken]
            if made is not None:
                joined.append(made[1])
                packs += [] if made[0] is None else [made[0]]
            while sum(each.size for each in packs) > max_bytes:
                joined.append(Joined(number, (packs.pop(0),)))
            return self._changed(base, number, packs, joined)

        return self._change(attempt)

    def forget(self, namespaces: Iterable[str]) -> Manifest:
        """Removes all text of namespaces, by what stands for them: see `id_of`.

        When this returns, no object that can be read holds any of it. Replicas forget what they
        have of it when they follow the manifest. Raises as `join`.
        """
        names = set(namespaces)

        def attempt(base: Manifest, number: int) -> Manifest:
            packs, joined = list[Pack](), list[Joined]()
            for pack in (*base.packs, *self.waiting(base).values()):
                kept = self._without(base, number, pack, names)
                if kept is not None:
                    joined.append(kept[1])
                    packs += [] if kept[0] is None else [kept[0]]
                elif not pack.replica:
                    packs.append(pack)
            return self._changed(base, number, packs, joined, names)

        self._change(attempt)
        # What was published meanwhile, and what killed processes have left, may hold it too.
        manifest = self.join()
        self._remove(manifest.sources.values())
        return manifest

    def _joined(
        self, base: Manifest, number: int, inputs: list[Pack]
    ) -> tuple[Pack | None, Joined] | None:
        """A pack with the text of others, as far as they can be read."""
        chunks: dict[str, list[Chunk]] = {}
        taken: list[Pack] = []
        size = 0
        for pack in inputs:
            if size > _MOST_JOINED:
                break
            try:
                found = self._chunks(pack)
            except FileNotFoundError:
                continue  # another process was first
            if found is None or None in found.values():
                continue
            for name, chunk in found.items():
                if chunk is not None and not base.stale(pack, name):
                    chunks.setdefault(name, []).append(chunk)
            taken.append(pack)
            size += pack.size
        # Packs alone are not written again.
        new = any(pack.replica for pack in taken)
        return self._replaced(number, taken, chunks) if new else None

    def _without(
        self, base: Manifest, number: int, pack: Pack, names: set[str]
    ) -> tuple[Pack | None, Joined] | None:
        """A pack without some namespaces; None where it has none of them, or cannot be read."""
        try:
            head = self.head(pack)
            if head is None or names.isdisjoint(head.names):
                return None
            found = self._chunks(pack) or {}
        except FileNotFoundError:
            return None
        chunks = {
            name: [chunk]
            for name, chunk in found.items()
            if chunk is not None and name not in names and not base.stale(pack, name)
        }
        return self._replaced(number, [pack], chunks)

    def _replaced(
        self, number: int, sources: list[Pack], chunks: dict[str, list[Chunk]]
    ) -> tuple[Pack | None, Joined]:
        pack = self._put(f"packs/{number:020d}", chunks) if chunks else None
        return pack, Joined(number, tuple(sources))

    def _changed(
        self,
        base: Manifest,
        number: int,
        packs: list[Pack],
        joined: list[Joined],
        names: Iterable[str] = (),
    ) -> Manifest:
        """A manifest with other packs, that forgets names; `base` where nothing is other."""
        there = {**self._ls("text", _TEXT), **self._ls("packs", _PACK)}
        named = {*base.packs, *packs, *base.sources.values()}
        named |= {pack for each in joined for pack in each.sources}
        # Packs of processes that were killed, or were not the first. One of this number may be of a
        # process that is at work.
        left = [
            pack
            for pack in there.values()
            if not pack.replica and pack not in named and pack.number < number
        ]
        if left:
            joined.append(Joined(number, tuple(left)))
        if not joined and not names and tuple(packs) == base.packs:
            return base
        # What is still there must stay named, or it would be taken for new text.
        kept = [
            each
            for each in base.joined
            if each.number > number - HISTORY or any(pack.name in there for pack in each.sources)
        ]
        forgotten = {name: at for name, at in base.forgotten.items() if at > number - _HORIZON}
        forgotten |= dict.fromkeys(names, number)
        return Manifest(number, tuple(packs), (*kept, *joined), forgotten)

    def _change(self, attempt: Callable[[Manifest, int], Manifest]) -> Manifest:
        for _ in range(_ATTEMPTS):
            base, number = self._latest()
            base = base or Manifest()
            old = [each for each in base.joined if each.number <= number - HISTORY]
            self._remove(pack for each in old for pack in each.sources)
            manifest = attempt(base, number)
            if manifest is base:
                return base
            if self._write(manifest):
                self._clean(base, manifest)
                return manifest
        raise DatastoreError(f"other processes were first {_ATTEMPTS} times; try again")

    def _clean(self, base: Manifest, manifest: Manifest) -> None:
        """Removes what is of no more use; what cannot be removed now goes the next time."""
        # Text that is to be forgotten may be in what was published before that was known.
        new = [pack for name, pack in manifest.sources.items() if name not in base.sources]
        self._remove(pack for pack in new if pack.replica and pack.number < manifest.late)
        with contextlib.suppress(OSError):
            for name in self._objects.ls(f"{self.group}/manifests"):
                if _NUMBER.fullmatch(name) and int(name) <= manifest.number - HISTORY:
                    self._objects.remove(f"{self.group}/manifests/{name}")

    def _remove(self, packs: Iterable[Pack]) -> None:
        for pack in packs:
            self._objects.remove(f"{self.group}/{pack.name}")


def groups(
    objects: LocalObjects | RemoteObjects,
    secret: bytes,
    refused: Callable[[str, Exception], None] = lambda *_: None,
) -> list[Published]:
    """What is published under a URL with a key, of each model; see `Published.refused`.

    Raises InvalidValueError where nothing is, and says whether there is something of another key.
    """
    folders = [name for name, size in objects.ls().items() if size is None and _ID.fullmatch(name)]
    found = [Published(objects, secret, name) for name in sorted(folders)]
    for each in found:
        each.refused = refused
    owned = [each for each in found if each.owned()]
    if not owned:
        others = f"; {len(found)} models have text of another key" if found else ""
        raise InvalidValueError(f"nothing is published there with this key{others}")
    return owned


def _manifest(number: int, value: Any) -> Manifest:
    """A manifest from JSON.

    Raises AttributeError, KeyError, TypeError or ValueError where it has another form.
    """
    if value["format"] != FORMAT or value["number"] != number:
        raise ValueError(f"format {value['format']!r}, number {value['number']!r}")
    return Manifest(
        number,
        tuple(map(_pack, value["packs"])),
        tuple(
            Joined(_count(at, _MOST_NUMBER), tuple(map(_pack, sources)))
            for at, sources in value["joined"]
        ),
        {_id(name): _count(at, _MOST_NUMBER) for name, at in value["forgotten"].items()},
    )


def _pack(value: Any) -> Pack:
    name, size = value
    return Pack(_name(name), _count(size, _MOST_OBJECT))


def _name(value: Any) -> str:
    """The name of an object: no other can leave its folder."""
    if isinstance(value, str):
        folder, _, name = value.partition("/")
        form = {"text": _TEXT, "packs": _PACK}.get(folder)
        if form is not None and form.fullmatch(name):
            return value
    raise ValueError(f"the name {value!r}")


def _id(value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError(f"the namespace {value!r}")
    return value


def _count(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise ValueError(f"the number {value!r}")
    return value
