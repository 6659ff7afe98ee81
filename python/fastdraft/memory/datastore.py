"""Datastores: text that requests share, live or frozen."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias

from fastdraft import _core
from fastdraft._describe import amount, size
from fastdraft.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import ArrayLike
    from typing_extensions import Self

__all__ = ["Datastore", "DatastoreWriter", "Occurrence", "build", "fingerprint"]


# In the class below `bytes` is a property.
Fingerprint: TypeAlias = bytes
_Parameters = ParamSpec("_Parameters")


class Occurrence(NamedTuple):
    """A position in a datastore behind an occurrence of the last tokens of some text."""

    next: int
    """The position of the token that followed."""
    length: int
    """How many of the text's last tokens precede it, at most 32."""
    output: bool = False
    """True if that token was a model's output."""


def _explained(init: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Has a constructor say what to write instead of a file or token ids."""

    @functools.wraps(init)
    def explained(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        if len(args) > 1:
            got = args[1]
            meant = got if isinstance(got, str) else "FILE"
            raise TypeError(
                "Datastore() makes an empty live store and takes nothing to fill it with, got "
                f"{got!r}: open a file by Datastore.open({meant!r}), "
                "add token ids to a live store by store.add(token_ids)"
            )
        init(*args, **kwargs)

    return explained


class Datastore(_core.Datastore):
    """Text of other requests to draft from: a log of documents with an index of its n-grams.

    A live store takes documents, and lets the oldest text go when `max_bytes` are used up. A
    frozen one is a file, mapped into memory, that any number of processes share. Engines share
    stores: pass one to as many as you like. All methods are thread-safe. `len(store)` is the
    number of tokens held.

    >>> store = Datastore(max_bytes=1 << 20)
    >>> store.add([1, 2, 3, 4, 5, 6])
    >>> store.find([9, 2, 3, 4])
    [Occurrence(next=5, length=3, output=False)]
    >>> store.read(5, 8).tolist()
    [5, 6]
    """

    _path: str | None = None  # of a frozen store's file

    @_explained
    def __init__(self, *, max_bytes: int = 2 << 30, fingerprint: Fingerprint | None = None) -> None:
        """Makes an empty live store.

        Args:
            max_bytes: What the store and its index may take of memory, a limit that holds at all
                times. It takes no more than it needs: about 11 bytes a token.
            fingerprint: Of the tokenizer, as `fingerprint` returns it; it is saved with the store
                and checked when the file is opened.

        Raises:
            InvalidValueError: `max_bytes` is too little to hold anything, or `fingerprint` is not
                32 bytes.
        """
        super().__init__(max_bytes=max_bytes, fingerprint=fingerprint)

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed:
            return f"<{name}, closed>"
        held = f"{amount(len(self), 'token')} in {amount(self.num_documents, 'document')}"
        if self.frozen:
            return f"<{name}, frozen, {held}, {size(self.bytes)}>"
        return f"<{name}, live, {held}, {size(self.bytes)} of at most {size(self.max_bytes)}>"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        fingerprint: Fingerprint | None = None,
        verify: bool = False,
    ) -> Datastore:
        """The frozen store in a file.

        The file is mapped, not read: this takes milliseconds, whatever its size. Replace it while
        it is open as `save` does, by another file of its name; shortening the file itself would end
        the processes that have it open.

        Args:
            path: A file that `save`, `build` or `fastdraft datastore build` wrote.
            fingerprint: Of the tokenizer that the tokens must be of.
            verify: Read the whole file and compare its checksums.

        Raises:
            DatastoreError: The file cannot be read or is no datastore, or it is truncated, damaged,
                of a newer version, or of another tokenizer. Without `verify`, damage between header
                and directory goes unnoticed; it yields wrong tokens, and nothing worse.
        """
        store = cls.__new__(cls)
        _core.Datastore.__init__(
            store, path=os.fsencode(path), fingerprint=fingerprint, verify=verify
        )
        store._path = os.path.abspath(path)
        return store

    def __deepcopy__(self, memo: dict[int, object]) -> Datastore:
        """The store itself: it is shared, as a lock is."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Datastore], tuple[str]]:
        """Another process opens the file of a frozen store; a live one cannot be pickled."""
        if self._path is None:
            raise TypeError("a live datastore cannot be pickled: save it, and open the file")
        return functools.partial(Datastore.open, fingerprint=self.fingerprint), (self._path,)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the store to a file that `open` takes, and replaces the one there, if any.

        A live store's weights of tokens are in it too. A live store beside it in a request begins
        with them. The file takes its name when it is complete and on the disk: after an error the
        one that was there is as it was. Text that enters or leaves meanwhile may or may not be in
        it. While it runs it takes about 20 bytes of memory for each token, of 2^25 tokens at most.

        Raises:
            DatastoreError: The file cannot be written: a full disk, no such folder, another writer
                of the same path.
            DatastoreClosedError: The store was closed.
        """
        self._save(os.fsencode(path))

    def find(
        self, token_ids: ArrayLike, *, most: int = 8, links: int = 32, least: int = 1
    ) -> list[Occurrence]:
        """Finds the longest suffixes of a text in the store.

        The longest first, of equally long ones the latest first. The latest occurrences of the
        text's last 4 tokens are looked at, then of its last 2, then of its last one, until there
        are `most`; only those that a token of the same document follows.

        Args:
            token_ids: The text, a list or a row of integers; its last 32 tokens count.
            most: How many occurrences to return at most.
            links: How many occurrences to look at. Of an n-gram a live store knows the latest 31, a
                frozen one the latest 64 of each 2^25 tokens.
            least: Of how many last tokens: 2 leaves out the last one's, 3 the last 2 tokens' too,
                from 5 on there are none.

        Raises:
            InvalidValueError: `most`, `links` or `least` is below 1, or `token_ids` is no row of
                token ids.
            DatastoreClosedError: The store was closed.
        """
        return [Occurrence(*found) for found in self._find(token_ids, most, links, least)]

    @property
    def bytes(self) -> int:
        """The bytes held: of memory, or of a frozen store's file."""
        return self._bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DatastoreWriter(_core.DatastoreWriter):
    """Writes a frozen store in bounded memory, document by document.

    Each 2^25 tokens make a segment with an index of its own, for which indexing takes about 20
    bytes a token. As a context manager it completes the file at the end of the block, and removes
    what was written where the block raises. Only the process that began a file may write it: a fork
    of it that does gets a DatastoreError, and leaves the file alone.

    >>> with DatastoreWriter("code.fds") as writer:      # doctest: +SKIP
    ...     for tokens in documents:
    ...         writer.begin_document()
    ...         writer.append(tokens)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: bytes | None = None,
        segment_tokens: int = 1 << 25,
    ) -> None:
        """Begins the temporary file `path`.tmp, which `finish` renames to `path`.

        That of a process that was killed stays until the next writer of the same path.

        Args:
            path: The file to write, or to replace.
            fingerprint: Of the tokenizer, as `fingerprint` returns it.
            segment_tokens: Fewer tokens a segment take less memory, and make lookups slower.

        Raises:
            DatastoreError: There is no such folder, it cannot be written to, or another writer is
                at the same path.
            InvalidValueError: `segment_tokens` or `fingerprint` is out of range.
        """
        super().__init__(
            path=os.fsencode(path), fingerprint=fingerprint, segment_tokens=segment_tokens
        )
        self._path = os.fspath(path)

    def __repr__(self) -> str:
        held = f"{amount(self.num_tokens, 'token')} in {amount(self.num_documents, 'document')}"
        return f"<{type(self).__name__} to {self._path!r}, {held} so far>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def build(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike],
    *,
    fingerprint: bytes | None = None,
) -> None:
    """Writes a frozen store of `documents`, rows of token ids, one after another.

    Raises:
        DatastoreError: The file cannot be written. What was at `path` is as it was.
        InvalidValueError: A document is no row of token ids.
    """
    with DatastoreWriter(path, fingerprint=fingerprint) as writer:
        for tokens in documents:
            writer.begin_document()
            writer.append(tokens)


def fingerprint(tokenizer: Any) -> bytes:
    """32 bytes that tell one tokenizer's token ids from another's.

    The SHA-256 of the vocabulary with its ids, the added tokens and the merges. How text is
    normalised and split does not enter, so tokenizers of one vocabulary share stores.

    Args:
        tokenizer: A tokenizer of transformers or tokenizers, or the path of a `tokenizer.json` or
            of the folder with it.

    Raises:
        InvalidValueError: `tokenizer` is none of these.
    """
    # Nobody else needs these, and importing the package should take no time.
    import hashlib
    import json

    description: Any
    if hasattr(tokenizer, "get_vocab") and not hasattr(_inner(tokenizer), "to_str"):
        description = {"model": {"vocab": tokenizer.get_vocab()}}  # written in Python
    else:
        content = tokenizer_json(tokenizer)
        try:
            description = json.loads(content)
        except ValueError as error:
            raise InvalidValueError(f"cannot read a tokenizer from {tokenizer}: {error}") from error
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise InvalidValueError(f"tokenizer must have a model with a vocabulary, got {tokenizer!r}")
    vocabulary = model["vocab"]
    # Unigram models list their pieces in the order of the ids.
    ids = (
        vocabulary
        if isinstance(vocabulary, dict)
        else {str(piece[0]): index for index, piece in enumerate(vocabulary)}
    )
    added = {token["content"]: token["id"] for token in description.get("added_tokens") or []}
    # Older files write a merge as a text of two parts.
    merges = [
        merge.split(" ", 1) if isinstance(merge, str) else merge
        for merge in model.get("merges") or []
    ]
    described = json.dumps([sorted({**ids, **added}.items()), merges], ensure_ascii=True)
    return hashlib.sha256(described.encode()).digest()


def tokenizer_json(tokenizer: Any) -> str:
    """The content of a tokenizer's `tokenizer.json`.

    Args:
        tokenizer: As `fingerprint` takes it.

    Raises:
        InvalidValueError: It cannot be read, or there is none.
    """
    if isinstance(tokenizer, str | os.PathLike):
        path = os.fspath(tokenizer)
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError(f"cannot read a tokenizer from {path}: {error}") from error
    inner = _inner(tokenizer)
    if not hasattr(inner, "to_str"):
        raise InvalidValueError(
            "tokenizer must be a tokenizer or the path of a tokenizer.json, got a "
            f"{type(tokenizer).__name__} without one"
        )
    content: str = inner.to_str()
    return content


def _inner(tokenizer: Any) -> Any:
    """The tokenizer of tokenizers that one of transformers wraps."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)
