"""The table of n-grams that needs no text of yours: frequent in a small model's answers.

Its text comes with fastdraft, as lines of JSON in common.jsonl.bz2, since n-grams are of tokens:
each tokenizer gets a table of its own when it is first met.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from fastdraft.errors import DatastoreError, FastdraftError, InvalidValueError
from fastdraft.files import cache_directory
from fastdraft.memory.datastore import fingerprint, tokenizer_json
from fastdraft.memory.ngrams import NgramTable, build

__all__ = ["common_ngrams", "common_texts", "default_ngrams", "load_tokenizer", "tokenizer_file"]

_logger = logging.getLogger(__name__)


def common_texts() -> Iterator[str]:
    """The texts that come with fastdraft, each an answer of SmolLM2-135M-Instruct (Apache-2.0)."""
    import bz2  # some builds of Python have none

    for line in bz2.decompress(_packed()).decode().splitlines():
        yield json.loads(line)["text"]


def common_ngrams(tokenizer: Any) -> NgramTable:
    """The table of common n-grams for a tokenizer.

    It is counted when the tokenizer is first met, which takes about four seconds, and kept in the
    cache folder (`FASTDRAFT_CACHE`, else the user's). Later calls take as long as `fingerprint`:
    0.2 s for a vocabulary of 50,000, a second for 250,000. A damaged file is written anew. Any
    number of processes may call this concurrently: one counts, the others wait. Nothing is fetched.

    Args:
        tokenizer: A tokenizer of transformers or tokenizers, or the path of a `tokenizer.json` or
            of the folder with it.

    Raises:
        InvalidValueError: `tokenizer` is none of these, or is written in Python.
        DatastoreError: The table cannot be kept.
    """
    mark = fingerprint(tokenizer)
    name = hashlib.sha256(mark + _packed()).hexdigest()[:32]
    path = cache_directory() / f"common-ngrams-{name}.fdn"
    with contextlib.suppress(DatastoreError):
        return NgramTable.open(path, fingerprint=mark)
    import filelock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock"):
            with contextlib.suppress(DatastoreError):  # another process was first
                return NgramTable.open(path, fingerprint=mark)
            encode = load_tokenizer(tokenizer).encode
            # One by one, since a batch starts threads, which a process that forks later must not.
            ids = (encode(text, add_special_tokens=False).ids for text in common_texts())
            build(path, ids, fingerprint=mark)
    except OSError as error:
        raise DatastoreError(f"cannot keep a table of n-grams in {path.parent}: {error}") from error
    return NgramTable.open(path, fingerprint=mark)


def default_ngrams(tokenizer: Any, vocabulary: int | None) -> NgramTable | None:
    """`common_ngrams` where nobody asked for it: None, and a line in the log, if there is none.

    Args:
        tokenizer: As `common_ngrams` takes it, or None where it is not known.
        vocabulary: The number of tokens that the target knows, if known.
    """
    if tokenizer is None:
        return None
    try:
        table = common_ngrams(tokenizer)
    except (FastdraftError, ImportError) as error:
        _logger.info("fastdraft: drafts have no common n-grams: %s", error)
        return None
    fits = vocabulary is None or table.largest_token < vocabulary
    return table if fits else None


def tokenizer_file(name: str, revision: str | None = None) -> str | None:
    """The path of a model's tokenizer.json on this machine, or None.

    Args:
        name: A folder, or a name on the Hugging Face hub.
        revision: The version on the hub.
    """
    path: object = os.path.join(name, "tokenizer.json")
    if not os.path.exists(str(path)):
        try:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        except (ImportError, ValueError):
            return None
    return path if isinstance(path, str) else None


def _packed() -> bytes:
    return files("fastdraft.memory").joinpath("common.jsonl.bz2").read_bytes()


def load_tokenizer(tokenizer: Any) -> Any:
    """A new `tokenizers.Tokenizer`, which neither cuts nor pads.

    Args:
        tokenizer: As `common_ngrams` takes it.

    Raises:
        InvalidValueError: It has no `tokenizer.json`, or one that tokenizers cannot read.
    """
    from tokenizers import Tokenizer

    content = tokenizer_json(tokenizer)
    try:
        loaded = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidValueError(f"cannot read a tokenizer from {tokenizer}: {error}") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
