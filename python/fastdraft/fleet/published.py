"""What is published of one model: objects with text, and the manifest, which says what counts."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.fleet.objects import LocalObjects, RemoteObjects
from fastdraft.fleet.sealed import Chunk, Head, digest, seal

__all__ = ["Manifest", "Pack", "Published", "groups"]

FORMAT = 4
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
# For this many manifests, what is gone stays, for those who are reading it.
HISTORY = 8
# Text that is published this many manifests late is refused, so what was forgotten earlier need not
# be known.
_HORIZON = 1024
_ATTEMPTS = 16

_ID = re.compile("[0-9a-f]{64}", re.ASCII)
_OBJECT = re.compile(
    "(text/[0-9]{20}-[0-9]{20}-[0-9a-f]{16}|packs/[0-9]{20})-[0-9a-f]{64}", re.ASCII
)
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


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which packs there are. What it does not name was published since."""

    number: int = 0
    """0 stands for the one before the first."""
    packs: tuple[Pack, ...] = ()
    """Older text first."""
    gone: Mapping[str, int] = field(default_factory=dict)
    """Objects that are of no more use, since their text is in packs or has left, and since which
    manifest. They are removed some manifests later."""
    forgotten: Mapping[str, int] = field(default_factory=dict)
    """Namespaces that were forgotten, and by which manifest: earlier text is of no use."""
    pinned: frozenset[str] = frozenset()
    """Namespaces that stay when there is too much text."""

    @property
    def bytes(self) -> int:
        return sum(pack.size for pack in self.packs)

    @property
    def late(self) -> int:
        """What was published before this manifest may have to be forgotten."""
        return max([*self.forgotten.values(), self.number - _HORIZON])

    def stale(self, text: Pack, namespace: str) -> bool:
        """Whether what a replica said in a namespace is to be forgotten."""
        number = text.number if text.replica else _MOST_NUMBER
        return number < max(self.forgotten.get(namespace, 0), self.number - _HORIZON)


_NONE = Manifest()
_Chunks = dict[str, Chunk | None]
_Found = TypeVar("_Found")


class Published:
    """What is published of one model under a URL.

    An object that is damaged or foreign is read twice, then left out by this instance, and stays as
    it is: another one may be able to read it.

    Args:
        objects: Those below the URL.
        secret: The operator's key.
        group: Stands for the model and its tokenizer.
        refused: Called with the name and the error of each object that is left out.

    Attributes:
        left_out: The names of objects that are left out.
    """

    def __init__(
        self,
        objects: LocalObjects | RemoteObjects,
        secret: bytes,
        group: str,
        refused: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        self.group = group
        self.left_out: set[str] = set()
        self._refused = refused
        self._objects = objects
        self._secret = secret
        self._bad: set[str] = set()  # objects, and entries of objects
        self._lost: set[str] = set()  # objects that were not there when they were read

    def id_of(self, namespace: Hashable) -> str:
        """What stands for a namespace. Raises InvalidValueError for a name that is no data."""
        return digest(self._secret, "namespace", self.group, namespace)

    def owned(self) -> bool:
        """Whether something here was written with this key."""
        return bool(self.latest().number) or any(map(self.head, self.texts().values()))

    # --- Objects with text ---

    def texts(self) -> dict[str, Pack]:
        """What replicas published and was not removed yet, older text first."""
        return self._ls("text")

    def current(self, manifest: Manifest) -> list[Pack]:
        """The objects whose text counts, older text first: packs, and what was published since."""
        texts = self.texts().items()
        return [*manifest.packs, *(pack for name, pack in texts if name not in manifest.gone)]

    def put_text(self, replica: str, sequence: int, seen: int, chunks: Mapping[str, Chunk]) -> Pack:
        """Publishes what a replica said in namespaces. When this returns it is there."""
        place = f"text/{seen:020d}-{sequence:020d}-{replica}"
        return self._put(place, {name: [chunk] for name, chunk in chunks.items()})

    def head(self, pack: Pack, ahead: int = _AHEAD) -> Head | None:
        """What a pack holds; None where it is left out. Raises FileNotFoundError the first time.

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

        return self._twice(pack.name, read)

    def chunk(self, pack: Pack, head: Head, entry: int) -> Chunk | None:
        """An entry of a pack; None where it is left out. Raises as `head`."""
        first, last = head.span(entry)
        with contextlib.suppress(DatastoreError):
            if last <= len(head.content):
                return head.chunk(entry, head.content[first:last])
        return self._twice(
            f"{pack.name}#{entry}", lambda: head.chunk(entry, self._read(pack, first, last))
        )

    def _chunks(self, pack: Pack) -> dict[str, Chunk | None] | None:
        """All that a pack holds by namespace; None where it is left out, or gone."""
        with contextlib.suppress(FileNotFoundError):  # another process was first
            head = self.head(pack, pack.size)
            if head is not None:
                return {name: self.chunk(pack, head, at) for at, name in enumerate(head.names)}
        return None

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

    def _twice(self, name: str, read: Callable[[], _Found]) -> _Found | None:
        """What `read` returns; None where that fails again, and from then on."""
        if name in self._bad:
            return None
        whole = name.partition("#")[0]
        failed: Exception
        for _ in range(2):
            try:
                return read()
            except (DatastoreError, PermissionError) as error:
                failed = error
            except FileNotFoundError as error:
                # It may be gone since it was listed. One that is gone the next time is missing.
                if whole not in self._lost:
                    self._lost.add(whole)
                    raise
                failed = error
        self._bad.add(name)
        if whole not in self.left_out:
            self.left_out.add(whole)
            self._refused(whole, failed)
        return None

    def _ls(self, folder: str) -> dict[str, Pack]:
        found = sorted(self._objects.ls(f"{self.group}/{folder}").items())
        named = [(f"{folder}/{name}", size) for name, size in found]
        return {
            name: Pack(name, size)
            for name, size in named
            if _OBJECT.fullmatch(name) and size is not None and 0 < size <= _MOST_OBJECT
        }

    # --- The manifest ---

    def latest(self, known: Manifest = _NONE) -> Manifest:
        """The last sound manifest; `known` where none is later. Raises OSError."""
        return self._latest(known)[0]

    def _latest(self, known: Manifest = _NONE) -> tuple[Manifest, int]:
        """And the first number after it that no file has."""
        found = self._objects.ls(f"{self.group}/manifests")
        sizes = {int(name): size for name, size in found.items() if _NUMBER.fullmatch(name)}
        manifest = known
        for number in sorted((each for each in sizes if each > known.number), reverse=True):
            with contextlib.suppress(FileNotFoundError):  # removed: there is a later one
                manifest = self._manifest(number, sizes[number] or 0) or known
            if manifest is not known:
                break
        # Damaged and foreign ones keep their numbers.
        free = manifest.number + 1
        while free in sizes:
            free += 1
        return manifest, free

    def _manifest(self, number: int, size: int) -> Manifest | None:
        name = f"manifests/{number:020d}"

        def read() -> Manifest:
            if not 0 < size <= _MOST_MANIFEST:
                raise DatastoreError(f"it must have 1 to {_MOST_MANIFEST} bytes, got {size}")
            return self._parse(number, self._read(Pack(name, size), 0, size))

        return self._twice(name, read)

    def _write(self, manifest: Manifest) -> bool:
        """Publishes a manifest; whether it has its number, and no other manifest does."""
        content = {"format": FORMAT, **asdict(manifest), "pinned": sorted(manifest.pinned)}
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
            max_bytes: The most bytes of all packs. Beyond it the oldest text leaves, but for that
                of pinned namespaces.

        Returns the manifest that says so, or the last one where there was nothing to do. O(text)
        amortised by a factor that grows with the logarithm of all text.

        Raises:
            OSError: The store fails. Nothing is lost.
            DatastoreError: Others were first again and again.
        """

        def attempt(base: Manifest, number: int, texts: list[Pack]) -> Manifest:
            most = min(_MOST_PACK, max(_LEAST_PACK, max_bytes // 16))
            packs, small = list(base.packs), list[Pack]()
            size = sum(text.size for text in texts)
            while packs and size < most and packs[-1].size <= min(_GROWTH * size, most):
                small.insert(0, packs.pop())
                size += small[0].size
            taken: dict[Pack, _Chunks] = {}
            for pack in (*small, *texts):
                found = self._chunks(pack)
                if found is not None and None not in found.values():
                    taken[pack] = found
                if sum(each.size for each in taken) > _MOST_JOINED:
                    break
            if not any(pack.replica for pack in taken):
                taken = {}  # packs alone are not written again
            packs += [pack for pack in small if pack not in taken]
            packs += self._packed(base, number, taken)
            for pack in list(packs):
                if sum(each.size for each in packs) > max_bytes:
                    place = packs.index(pack)
                    pinned = base.pinned
                    kept = self._kept(base, number, pack, pinned.__contains__) if pinned else []
                    packs[place : place + 1] = kept
            return _with(base, number, packs, taken)

        return self._change(attempt)

    def forget(self, namespaces: Iterable[str]) -> Manifest:
        """Removes all text of namespaces, by what stands for them: see `id_of`.

        When this returns, no object that can be read holds any of it, and they are not pinned.
        Replicas forget what they have of it when they follow the manifest. Raises as `join`.
        """
        names = set(namespaces)

        def attempt(base: Manifest, number: int, texts: list[Pack]) -> Manifest:
            packs, taken = list[Pack](), list[Pack]()
            for pack in (*base.packs, *texts):
                kept = self._kept(base, number, pack, lambda name: name not in names)
                if kept != [pack]:
                    taken.append(pack)
                if kept != [pack] or not pack.replica:
                    packs += kept
            return replace(
                _with(base, number, packs, taken),
                forgotten={**base.forgotten, **dict.fromkeys(names, number)},
                pinned=base.pinned - names,
            )

        self._change(attempt)
        # What was published meanwhile, and what killed processes have left, may hold it too.
        manifest = self.join()
        self._remove(manifest.gone)
        return manifest

    def pin(self, namespaces: Iterable[str], *, pinned: bool = True) -> Manifest:
        """Keeps namespaces when there is too much text, or no longer. Raises as `join`."""
        names = frozenset(namespaces)
        return self._change(
            lambda base, *_: replace(
                base, pinned=base.pinned | names if pinned else base.pinned - names
            )
        )

    def _kept(
        self, base: Manifest, number: int, pack: Pack, keep: Callable[[str], bool]
    ) -> list[Pack]:
        """What takes the place of a pack to lose namespaces: itself where it has none of them, or
        cannot be read."""
        with contextlib.suppress(FileNotFoundError):
            head = self.head(pack)
            if head is not None and not all(map(keep, head.names)):
                chunks = self._chunks(pack)
                if chunks is not None:
                    return self._packed(base, number, {pack: chunks}, keep)
        return [pack]

    def _packed(
        self,
        base: Manifest,
        number: int,
        taken: Mapping[Pack, _Chunks],
        keep: Callable[[str], bool] = lambda _: True,
    ) -> list[Pack]:
        """A pack with what others hold, if that is anything that can be read and is to be kept."""
        chunks: dict[str, list[Chunk]] = {}
        for pack, found in taken.items():
            for name, chunk in found.items():
                if chunk is not None and keep(name) and not base.stale(pack, name):
                    chunks.setdefault(name, []).append(chunk)
        return [self._put(f"packs/{number:020d}", chunks)] if chunks else []

    def _change(self, attempt: Callable[[Manifest, int, list[Pack]], Manifest]) -> Manifest:
        """Publishes a manifest, or returns the last one where there is nothing to change.

        `attempt` makes it from the last one, its number, and what was published since. It is called
        again where another process was first.
        """
        for _ in range(_ATTEMPTS):
            base, number = self._latest()
            self._remove(name for name, at in base.gone.items() if at <= number - HISTORY)
            there = {**self.texts(), **self._ls("packs")}
            new = [pack for name, pack in there.items() if name not in base.gone]
            made = attempt(base, number, [pack for pack in new if pack.replica])
            # Packs of processes that were killed, or were not the first. One of this number may be
            # of a process that is at work.
            left = [
                pack.name
                for pack in new
                if not pack.replica and pack not in base.packs and pack.number < number
            ]
            if made == base and not left:
                return base
            # What was removed above needs no name any more.
            gone = {name: at for name, at in made.gone.items() if at > number - HISTORY}
            gone |= dict.fromkeys(left, number)
            forgotten = {name: at for name, at in made.forgotten.items() if at > number - _HORIZON}
            made = replace(made, number=number, gone=gone, forgotten=forgotten)
            if self._write(made):
                self._clean(base, made)
                return made
        raise DatastoreError(f"other processes were first {_ATTEMPTS} times; try again")

    def _clean(self, base: Manifest, manifest: Manifest) -> None:
        """Removes what is of no more use; what cannot be removed now goes the next time."""
        # Text that is to be forgotten may be in what was published before that was known.
        new = [Pack(name, 0) for name in manifest.gone.keys() - base.gone.keys()]
        self._remove(each.name for each in new if each.replica and each.number < manifest.late)
        with contextlib.suppress(OSError):
            for name in self._objects.ls(f"{self.group}/manifests"):
                if _NUMBER.fullmatch(name) and int(name) <= manifest.number - HISTORY:
                    self._objects.remove(f"{self.group}/manifests/{name}")

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._objects.remove(f"{self.group}/{name}")


def groups(
    objects: LocalObjects | RemoteObjects,
    secret: bytes,
    refused: Callable[[str, Exception], None] = lambda *_: None,
) -> list[Published]:
    """What is published under a URL with a key, of each model; see `Published`.

    Raises InvalidValueError where nothing is, and says whether there is something of another key.
    """
    folders = [name for name, size in objects.ls().items() if size is None and _ID.fullmatch(name)]
    found = [Published(objects, secret, name, refused) for name in sorted(folders)]
    owned = [each for each in found if each.owned()]
    if not owned:
        others = f"; {len(found)} models have text of another key" if found else ""
        raise InvalidValueError(f"nothing is published there with this key{others}")
    return owned


def _with(base: Manifest, number: int, packs: list[Pack], taken: Iterable[Pack]) -> Manifest:
    """A manifest with other packs, in whose place others and `taken` objects are."""
    gone = [pack.name for pack in (*base.packs, *taken) if pack not in packs]
    return replace(base, packs=tuple(packs), gone={**base.gone, **dict.fromkeys(gone, number)})


def _manifest(number: int, value: Any) -> Manifest:
    """A manifest from JSON.

    Raises AttributeError, KeyError, TypeError or ValueError where it has another form.
    """
    if value["format"] != FORMAT or value["number"] != number:
        raise ValueError(f"format {value['format']!r}, number {value['number']!r}")
    return Manifest(
        number,
        tuple(map(_pack, value["packs"])),
        {_named(_OBJECT, name): _count(at, _MOST_NUMBER) for name, at in value["gone"].items()},
        {_named(_ID, name): _count(at, _MOST_NUMBER) for name, at in value["forgotten"].items()},
        frozenset(_named(_ID, name) for name in value["pinned"]),
    )


def _pack(value: Any) -> Pack:
    name, size = value
    return Pack(_named(_OBJECT, name), _count(size, _MOST_OBJECT))


def _named(form: re.Pattern[str], value: Any) -> str:
    """A name of a form: no object's can leave its folder."""
    if form.fullmatch(value) is None:
        raise ValueError(f"the name {value!r}")
    return str(value)


def _count(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError(f"the number {value!r}")
    return value
