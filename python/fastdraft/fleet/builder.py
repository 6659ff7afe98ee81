"""The builder of a fleet: joins what replicas published to stores, and says which there are."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastdraft.datastore import Datastore
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.files import TemporaryFolder
from fastdraft.fleet.published import (
    TEMPORARY,
    Entry,
    Manifest,
    Published,
    Segment,
    StoreFile,
)

__all__ = ["Builder"]

# Of a namespace: each is looked up for every token, so there are few. A store is written again
# when so many times fewer bytes come after it.
_MOST_STORES = 4
_GROWTH = 4
# When there is too much, so much less than allowed is kept: the next time is far off then.
_KEPT = 0.75
_LEAST_BYTES = 2 << 20
_ATTEMPTS = 16

_logger = logging.getLogger(__name__)


def _age(item: tuple[str, Entry]) -> int:
    return item[1].written


@dataclass
class _Work:
    """What an attempt has done, to be undone where another builder was first."""

    stores: list[tuple[str, StoreFile]] = field(default_factory=list)
    stale: list[tuple[str, str]] = field(default_factory=list)
    """Segments with forgotten text."""


class Builder:
    """Joins the segments of one model to stores.

    Any number of builders may work at once, or be killed. A builder uploads the stores first, and
    then the manifest that names them; the manifest's number is free for one builder alone, and a
    second one begins anew. Segments are removed one manifest later than the one that names them.
    Segments that no manifest names are found the next time. Not thread-safe; use one for each
    thread.

    Joining takes about 21 bytes of memory for each token of the stores and segments that are joined
    at once: of a namespace's text at most.

    Args:
        published: Of the model.
        max_bytes: The most bytes of all stores, and of those of one namespace: 8 to 10 a token of
            most text. Beyond it the namespaces whose text changed longest ago leave, but for pinned
            ones; of a namespace the oldest text.
        folder: Where to make temporary folders; by default where the system does.

    Attributes:
        number: Of the manifest that was seen or written last.
        refused: Segments, stores and manifests that were damaged, foreign or not there.
    """

    def __init__(
        self,
        published: Published,
        *,
        max_bytes: int = 8 << 30,
        folder: str | None = None,
    ) -> None:
        if max_bytes < _LEAST_BYTES:
            raise InvalidValueError(f"max_bytes must be at least {_LEAST_BYTES}, got {max_bytes}")
        self.number = 0
        self.refused = 0
        self._name = secrets.token_hex(8)  # so that no other builder's store has the same one
        self._published = published
        self._max_bytes = max_bytes
        self._folder = folder

    def build(self) -> Manifest:
        """Puts what replicas have published since into stores.

        Returns the manifest that says so, or the last one where there was nothing new. O(new text),
        amortised by a factor that grows with the logarithm of all text.

        Raises:
            OSError: The store fails, or the disk is full. Nothing is lost.
            DatastoreError: Other builders were first again and again.
        """

        def attempt(base: Manifest, number: int, work: _Work) -> Manifest:
            found = self._published.segments()
            namespaces = dict(base.namespaces)
            for name, segments in found.items():
                entry = namespaces.get(name, Entry())
                known = set(entry.segments)
                stale = base.forgotten.get(name, 0)
                work.stale += [(name, each.file) for each in segments if each.seen < stale]
                fresh = [each for each in segments if each.file not in known and each.seen >= stale]
                if fresh:
                    left = tuple(each.file for each in segments if each.file in known)
                    entry = replace(entry, segments=left)
                    namespaces[name] = self._joined(name, entry, fresh, number, work)
            if namespaces == base.namespaces and base.number:
                return base
            return replace(base, number=number, namespaces=self._bounded(namespaces))

        return self._change(attempt)

    def forget(self, namespaces: Iterable[str]) -> Manifest:
        """Removes all text of namespaces, by what stands for them: see `Published.id_of`.

        When this returns, no file holds any of it. Replicas forget what they have of it when they
        follow the manifest. Raises as `build`.
        """
        names = list(namespaces)

        def attempt(base: Manifest, number: int, _work: _Work) -> Manifest:
            return replace(
                base,
                number=number,
                namespaces={n: each for n, each in base.namespaces.items() if n not in names},
                forgotten={**base.forgotten, **dict.fromkeys(names, number)},
            )

        manifest = self._change(attempt)
        segments, stores = self._published.segments(), self._published.stores()
        for name in names:
            for segment in segments.get(name, []):
                if segment.seen < manifest.number:
                    self._published.remove_segment(name, segment.file)
            for file in stores.get(name, {}):
                if int(file[:20]) <= manifest.number:
                    self._published.remove_store(name, file)
        return manifest

    def pin(self, namespaces: Iterable[str], *, pinned: bool = True) -> Manifest:
        """Keeps namespaces when there is too much text, or no longer. Raises as `build`."""
        names = list(namespaces)

        def attempt(base: Manifest, number: int, _work: _Work) -> Manifest:
            changed = {
                name: replace(base.namespaces.get(name, Entry(written=number)), pinned=pinned)
                for name in names
            }
            return replace(base, number=number, namespaces={**base.namespaces, **changed})

        return self._change(attempt)

    def latest(self) -> Manifest:
        """The last manifest; number 0 before the first. Raises OSError."""
        return self._latest()[0]

    def _latest(self) -> tuple[Manifest, int]:
        latest = self._published.latest()
        for error in latest.wrong:
            self._refuse(error)
        manifest = latest.manifest or Manifest()
        self.number = manifest.number
        return manifest, latest.free

    def _change(self, attempt: Callable[[Manifest, int, _Work], Manifest]) -> Manifest:
        for _ in range(_ATTEMPTS):
            base, number = self._latest()
            work = _Work()
            try:
                manifest = attempt(base, number, work)
            except BaseException:
                self._undo(work)
                raise
            if manifest is base:
                self._remove(work.stale)
                return base
            # After an error it may be there all the same, and what it names has to stay.
            if self._published.write(manifest):
                self.number = manifest.number
                self._clean(base, manifest, work)
                return manifest
            self._undo(work)
        raise DatastoreError(f"other builders were first {_ATTEMPTS} times; try again")

    def _undo(self, work: _Work) -> None:
        with contextlib.suppress(OSError):  # what stays is removed by a later build
            for name, store in work.stores:
                self._published.remove_store(name, store.file)

    def _joined(
        self, name: str, entry: Entry, fresh: list[Segment], number: int, work: _Work
    ) -> Entry:
        """A namespace with further segments."""
        stores = list(entry.stores)
        joined: list[StoreFile] = []
        size = sum(each.bytes for each in fresh)
        while stores and (stores[-1].bytes <= _GROWTH * size or len(stores) >= _MOST_STORES):
            joined.insert(0, stores.pop())
            size += joined[0].bytes
        others = sum(each.bytes for each in stores)
        most = self._max_bytes - others
        if size > most:
            joined, stores = stores + joined, []
            most = int(_KEPT * self._max_bytes)
        taken: list[str] = []
        with TemporaryFolder(TEMPORARY, self._folder) as folder:
            path = folder.path / "store.fds"
            # It takes what its text needs; the file alone is bounded.
            with Datastore(max_bytes=sys.maxsize) as live:
                for store in joined:
                    try:
                        with self._published.open_store(name, store, folder.path) as source:
                            live.add_all(source)
                    except (DatastoreError, FileNotFoundError) as error:
                        self._refuse(error)
                for segment in fresh:
                    try:
                        with self._published.open_segment(name, segment, folder.path) as source:
                            live.add_all(source)
                    except FileNotFoundError:
                        continue  # another builder has taken it
                    except DatastoreError as error:
                        self._refuse(error)
                        continue
                    taken.append(segment.file)
                if not taken:
                    return entry
                tokens = _save(live, path, most)
            path.chmod(0o600)
            made = self._published.put_store(name, number, self._name, path, tokens)
        work.stores.append((name, made))
        return replace(
            entry,
            stores=(*stores, made),
            segments=(*entry.segments, *taken),
            written=number,
        )

    def _bounded(self, namespaces: dict[str, Entry]) -> dict[str, Entry]:
        """The namespaces without those whose text changed longest ago, where there is too much."""
        total = Manifest(namespaces=namespaces).bytes
        for name, entry in sorted(namespaces.items(), key=_age):
            if total <= self._max_bytes:
                break
            if not entry.pinned:
                total -= entry.bytes
                # What it was made of must not come again.
                namespaces[name] = replace(entry, stores=())
        return {
            name: entry
            for name, entry in namespaces.items()
            if entry.stores or entry.segments or entry.pinned
        }

    def _clean(self, base: Manifest, manifest: Manifest, work: _Work) -> None:
        """Removes what nothing names any more; what cannot be removed now goes the next time."""
        try:
            self._remove(work.stale)
            self._remove(
                (name, file) for name, entry in base.namespaces.items() for file in entry.segments
            )
            named = {
                (name, store.file)
                for each in (base, manifest)
                for name, entry in each.namespaces.items()
                for store in entry.stores
            }
            for name, files in self._published.stores().items():
                for file in files:
                    # One of a later number may be of a builder that is at work.
                    if (name, file) not in named and int(file[:20]) <= base.number:
                        self._published.remove_store(name, file)
            self._published.remove_old_manifests(manifest.number)
            self._published.remove_begun()
        except OSError as error:
            _logger.warning("fastdraft: what is of no more use stays for now: %s", error)

    def _remove(self, segments: Iterable[tuple[str, str]]) -> None:
        for name, file in segments:
            self._published.remove_segment(name, file)

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        if self.refused == 1:
            _logger.warning(
                "fastdraft: a file is left out: %s; further ones are only counted", error
            )


def _save(live: Datastore, path: Path, most: int) -> int:
    """Writes a live store to a file of `most` bytes at most, without its oldest text as need be.

    Returns the tokens that were written.
    """
    first = live.begin
    live.save(path)
    while (size := path.stat().st_size) > most:
        # Some text takes less than the rest, so this may have to be done again.
        first = live.end - int((live.end - first) * 0.98 * most / size)
        live.save(path, first=first)
    with Datastore.open(path) as saved:
        return len(saved)
