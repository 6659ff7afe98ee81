"""Which versions of transformers were tested, and what to say where a newer one fails."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from fastdraft.errors import FastdraftError

__all__ = ["NEWEST", "OLDEST", "explaining_version_errors", "newer"]

OLDEST: Final = (5, 19)
"""The oldest transformers that was tested, and that the extra `hf` allows."""
NEWEST: Final = (5, 24)
"""The newest transformers that was tested."""


def newer() -> str | None:
    """The warning about a transformers newer than was tested; `None` for one that was."""
    found = version("transformers")
    major, minor = (int(part) for part in found.split(".")[:2])
    if (major, minor) <= NEWEST:
        return None
    oldest, newest = ("{}.{}".format(*each) for each in (OLDEST, NEWEST))
    own = version("fastdraft").rpartition(".")[0]
    return (
        f"fastdraft {own} was tested with transformers {oldest} to {newest}; this is {found}: "
        f"pip install 'transformers<{NEWEST[0]}.{NEWEST[1] + 1}'"
    )


@contextlib.contextmanager
def explaining_version_errors() -> Iterator[None]:
    """Names a transformers newer than was tested where its interface differs from what we use.

    Errors of a caller's own code, such as a streamer's, pass unchanged.

    Raises:
        FastdraftError: Instead of what Python raises for a name or an argument that is not there.
    """
    try:
        yield
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        sentence = newer()
        if sentence is None or not _is_of_interface(error):
            raise
        raise FastdraftError(f"{sentence} ({type(error).__name__}: {error})") from error


def _is_of_interface(error: BaseException) -> bool:
    """Returns whether code of fastdraft or transformers raised it, or torch for them."""
    packages = [
        frame.f_globals.get("__name__", "").partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    raised = [package for package in packages if package != "torch"]
    return raised[-1:] in (["fastdraft"], ["transformers"])
