"""Tables of n-grams: which tokens often follow others, counted from text beforehand."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from fastdraft import _core
from fastdraft._describe import size
from fastdraft.memory.datastore import Fingerprint

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["NgramGuess", "NgramTable", "build"]


class NgramGuess(NamedTuple):
    """A token that may follow a text."""

    token: int
    order: int
    """The length of the context that it follows, 1 to 3."""
    probability: float
    """Its probability there, a power of the square root of 1/2."""


class NgramTable(_core.NgramTable):
    """A file that says which tokens often follow the last one, two or three of a text.

    Where nothing that a request can copy matches its last four tokens, the default drafter also
    considers the likeliest tokens of `DraftConfig(ngrams=table)`. The file is mapped into memory,
    which all engines and processes share; it never changes. `build` and `fastdraft ngrams build`
    write one.

    >>> build("words.fdn", [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4]])  # doctest: +SKIP
    >>> NgramTable.open("words.fdn").guess([1, 2])  # doctest: +SKIP
    [NgramGuess(token=3, order=2, probability=0.5), NgramGuess(token=4, order=2, probability=0.5)]
    """

    _path: str

    def __init__(self) -> None:
        raise TypeError(
            "NgramTable() opens nothing: use NgramTable.open(PATH), or build(PATH, ...)"
        )

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, fingerprint: Fingerprint | None = None
    ) -> NgramTable:
        """The table in a file, which is read once and compared with its checksums: milliseconds.

        Args:
            path: A file that `build` or `fastdraft ngrams build` wrote.
            fingerprint: Of the tokenizer that the tokens must be of, as `datastore.fingerprint`
                returns it.

        Raises:
            DatastoreError: The file cannot be read or is no table, or it is truncated, damaged, of
                a newer version, or of another tokenizer.
        """
        table = cls.__new__(cls)
        _core.NgramTable.__init__(table, path=os.fsencode(path), fingerprint=fingerprint)
        table._path = os.path.abspath(path)
        return table

    def guess(self, token_ids: ArrayLike, *, most: int = 2) -> list[NgramGuess]:
        """The likeliest tokens after a text, at most `most` (1 to 24) of them.

        Those that follow its longest context in the table come first, by falling probability; then
        those that only follow a shorter one.

        Raises:
            InvalidValueError: `most` is out of range, or `token_ids` is no row of token ids.
        """
        return [NgramGuess(*each) for each in self._guess(token_ids, most)]

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return self._bytes

    def __repr__(self) -> str:
        held = f"{self.num_entries:,} n-grams after {self.num_contexts:,} contexts"
        return f"<{type(self).__name__}, {held}, {size(self.bytes)}>"

    def __deepcopy__(self, memo: dict[int, object]) -> NgramTable:
        """The table itself, which never changes."""
        return self

    def __reduce__(self) -> tuple[Callable[..., NgramTable], tuple[str]]:
        """Another process opens the file."""
        return functools.partial(NgramTable.open, fingerprint=self.fingerprint), (self._path,)


def build(
    path: str | os.PathLike[str],
    texts: Iterable[ArrayLike],
    *,
    groups: Iterable[int] | None = None,
    fingerprint: bytes | None = None,
) -> None:
    """Counts the n-grams of `texts`, rows of token ids, and writes their table.

    An n-gram counts once for each text that has it, and must have two. Of the tokens that follow a
    context of one to three tokens with a probability of at least 0.02, the eight likeliest are
    kept. Probabilities are smoothed by absolute discounting (H. Ney, U. Essen and R. Kneser, On
    Structuring Probabilistic Dependences in Stochastic Language Modelling, 1994). The file takes
    its name when it is complete. Takes about 50 bytes of memory a token.

    Args:
        path: The file to write, or to replace.
        texts: Their tokens, each from 0 to 1,048,575.
        groups: For each text a number from 0 to 2^32 - 1. Texts of one number count as one, such as
            several answers to one question. By default each counts for itself.
        fingerprint: Of the tokenizer, as `datastore.fingerprint` returns it.

    Raises:
        InvalidValueError: A token or a group is out of range, or `fingerprint` is not 32 bytes.
        DatastoreError: The file cannot be written, or another writer is at the same path.
        ValueError: There are more texts than groups, or fewer.
    """
    writer = _core.NgramTableWriter(path=os.fsencode(path), fingerprint=fingerprint)
    pairs = enumerate(texts) if groups is None else zip(groups, texts, strict=True)
    for group, text in pairs:
        writer.add(text, group=group)
    writer.finish()
