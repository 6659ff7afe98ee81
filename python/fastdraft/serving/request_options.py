"""The options of one request: their names, and what each may be.

The HTTP front checks them before the server sees a request, and every adapter checks them again
before the engine does, since a request may come without HTTP.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft.errors import InvalidValueError

__all__ = [
    "CORPUS",
    "CORPUS_ID",
    "LOOKAHEAD",
    "MOST_CORPUS_IDS",
    "MOST_IDS",
    "NAMESPACE",
    "OPTIONS",
    "PREDICTION",
    "REMEMBER",
    "SWITCH",
    "TEMPLATES",
    "TICKET",
    "UNLIMITED",
    "RequestOptions",
    "request_options",
]

PREDICTION: Final = "prediction_token_ids"
"""The token ids of the text that the caller expects."""
TEMPLATES: Final = "fastdraft_template_ids"
"""The token ids of text that parts of the answer may look like: see `fastdraft.templates`."""
REMEMBER: Final = "fastdraft_remember"
"""False keeps the request and the memory of earlier requests apart."""
NAMESPACE: Final = "fastdraft_namespace"
"""The name of those with whom the request shares text: it sees no others' text, nor they its."""
CORPUS_ID: Final = "fastdraft_corpus_id"
"""The name of a corpus that a request of the namespace has brought."""
CORPUS: Final = "fastdraft_corpus_token_ids"
"""The token ids of that corpus; requests that follow may name it alone."""
SWITCH: Final = "fastdraft"
""""off" indexes and drafts nothing for the request."""
LOOKAHEAD: Final = "fastdraft_lookahead"
"""The longest draft that the request wants."""

TICKET: Final = "prediction_ticket"
"""Under what a front's ledger notes what became of the prediction."""

OPTIONS: Final = (PREDICTION, TEMPLATES, REMEMBER, NAMESPACE, CORPUS_ID, CORPUS, SWITCH, LOOKAHEAD)

UNLIMITED: Final = int(np.iinfo(np.int32).max)
"""More tokens than any text has."""

MOST_IDS: Final = 1 << 17
"""The most token ids of a prediction, and of templates: a host indexes them between two steps of
all its requests."""
MOST_CORPUS_IDS: Final = 1 << 20
"""The most token ids of a corpus."""

_LONGEST_NAME: Final = 256
_OURS: Final = ("fastdraft", "predictions", "prediction_")


class RequestOptions(NamedTuple):
    """The checked options of a request."""

    lookahead: int = UNLIMITED
    """The longest draft; 0 if the request is neither indexed nor drafted for."""
    remember: bool = True
    """False keeps it from drafting from the memory of earlier requests, and from entering it."""
    namespace: str | None = None
    corpus_id: str | None = None
    corpus: NDArray[np.int32] | None = None
    prediction: NDArray[np.int32] | None = None
    templates: NDArray[np.int32] | None = None


def request_options(
    params: Mapping[str, Any], own: Collection[str] = (), *, vocabulary: int = UNLIMITED + 1
) -> RequestOptions:
    """The options among a request's own parameters; other programs' parameters are passed over.

    Args:
        params: The request's own parameters. A missing name and None say the same, but for the two
            switches: `fastdraft` and `fastdraft_remember` are true, false, 1 or 0 (some hosts send
            a bool as an integer), the former also "on" or "off".
        own: Such names that the host has put there itself.
        vocabulary: The target's tokens.

    Raises:
        InvalidValueError: An option is not what it may be, or a name begins with "fastdraft" or
            "predictions" or "prediction_" and is not a known option. The message begins with the
            name.
    """
    for name in params:
        known = name in OPTIONS or name == TICKET or name in own
        if not known and isinstance(name, str) and name.lower().startswith(_OURS):
            close = difflib.get_close_matches(name.lower(), OPTIONS, n=1, cutoff=0.5)
            meant = f"; is it {close[0]}?" if close else ""
            raise InvalidValueError(f"{reprlib.repr(name)[1:-1]} is not a known option{meant}")
    corpus_id = _name(params, CORPUS_ID)
    corpus = _ids(params, CORPUS, MOST_CORPUS_IDS, vocabulary)
    if corpus is not None and corpus_id is None:
        raise InvalidValueError(f"{CORPUS} needs a {CORPUS_ID}, got none")
    return RequestOptions(
        lookahead=_lookahead(params),
        remember=_switch(params, REMEMBER, True, False),
        namespace=_name(params, NAMESPACE),
        corpus_id=corpus_id,
        corpus=corpus,
        prediction=_ids(params, PREDICTION, MOST_IDS, vocabulary),
        templates=_ids(params, TEMPLATES, MOST_IDS, vocabulary),
    )


def _lookahead(params: Mapping[str, Any]) -> int:
    longest = params.get(LOOKAHEAD)
    if longest is None:
        longest = UNLIMITED
    if isinstance(longest, bool) or not isinstance(longest, int):
        raise InvalidValueError(f"{LOOKAHEAD} must be an integer, got {reprlib.repr(longest)}")
    if longest < 1:
        raise InvalidValueError(
            f"{LOOKAHEAD} must be at least 1, got {reprlib.repr(longest)}; to draft nothing, say "
            f"{SWITCH}: 'off'"
        )
    on = _switch(params, SWITCH, "on", "off")
    return min(longest, UNLIMITED) if on else 0


def _switch(params: Mapping[str, Any], name: str, on: object, off: object) -> bool:
    """A truth value, true where it is not there."""
    value = params.get(name, True)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value in (on, off):
        return value == on
    raise InvalidValueError(f"{name} must be {on!r} or {off!r}, got {reprlib.repr(value)}")


def _name(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    if value is None:
        return None
    if not (isinstance(value, str) and 1 <= len(value) <= _LONGEST_NAME and _is_text(value)):
        raise InvalidValueError(
            f"{name} must be a text of 1 to {_LONGEST_NAME} characters, got {reprlib.repr(value)}"
        )
    return value


def _is_text(value: str) -> bool:
    """False if it cannot be encoded: JSON may hold one half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids(
    params: Mapping[str, Any], name: str, most: int, vocabulary: int
) -> NDArray[np.int32] | None:
    value = params.get(name)
    if value is None:
        return None
    # The length first: what is refused for it should not be converted.
    if hasattr(value, "__len__") and not isinstance(value, str) and len(value) > most:
        raise InvalidValueError(f"{name} must be at most {most} token ids, got {len(value)}")
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different lengths
        ids = np.empty(())
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidValueError(f"{name} must be a list of token ids, got {reprlib.repr(value)}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidValueError(f"{name} must be token ids of 0 to {vocabulary - 1}, got {wrong}")
    return ids.astype(np.int32)
