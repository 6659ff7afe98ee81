"""The tokenizer of recorded texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastdraft.datastore import fingerprint
from fastdraft.errors import FastdraftError, InvalidValueError

__all__ = ["TextTokenizer", "TokenizerError"]


class TokenizerError(FastdraftError):
    """A tokenizer that cannot be loaded."""


class TextTokenizer:
    """A tokenizer of the library tokenizers, loaded when it is needed first.

    All methods raise TokenizerError where it cannot be loaded.
    """

    def __init__(self, path: Path | Callable[[], Path]) -> None:
        """`path` is a `tokenizer.json` or the folder of one, or is called for it when needed."""
        self._path = path
        self._load = cache(self._loaded)

    def _loaded(self) -> Any:
        from tokenizers import Tokenizer

        path = self._path if isinstance(self._path, Path) else self._path()
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises nothing narrower.
            raise TokenizerError(f"cannot load {file} as a tokenizer: {error}") from error
        # Truncation and padding in the file are meant for a model's batches.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def is_loaded(self) -> bool:
        """Whether it was needed so far."""
        return self._load.cache_info().currsize > 0

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        """The token ids of texts, without special tokens. Raises InvalidValueError."""
        tokenizer = self._load()
        try:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:  # for half a surrogate pair, as a shell's bytes may become
            raise InvalidValueError("a text to tokenize is not UTF-8") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._load().decode(ids, skip_special_tokens=False)
        return text

    def fingerprint(self) -> bytes:
        """What tells this tokenizer's token ids from another's."""
        return fingerprint(self._load())
