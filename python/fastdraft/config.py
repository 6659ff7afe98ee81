"""How an engine drafts: a frozen configuration, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdraft.errors import InvalidValueError

__all__ = ["MAX_REQUEST_TOKENS", "DraftConfig"]

MAX_REQUEST_TOKENS = 2**26 - 2
"""The longest text that one request's index can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Chooses a drafter. `DraftConfig()` is the default one.

    The default drafter copies what followed the latest occurrence of the longest suffix of the
    request's text, goes on with a copy that an edit interrupted, or follows the request's
    prediction, whichever promises most by calibrated acceptance, and drafts a token only while it
    pays for its cost.
    """

    lookahead: int = 16
    """The longest draft, in tokens."""
    token_cost: float = 0.02
    """What a further token in a target forward costs, as a fraction of a forward over one token,
    for calls that give no cost of their own. 0 drafts all of the lookahead."""
    max_ngram: int | None = None
    """Set by `prompt_lookup`; None for the default drafter."""
    max_request_tokens: int = MAX_REQUEST_TOKENS
    """The most tokens that one request may hold, and the longest prediction."""
    max_bytes: int | None = None
    """The most bytes that all indexes of the engine may hold together; None: no limit."""

    @classmethod
    def prompt_lookup(
        cls,
        max_ngram: int = 3,
        num_tokens: int = 10,
        *,
        max_request_tokens: int = MAX_REQUEST_TOKENS,
        max_bytes: int | None = None,
    ) -> DraftConfig:
        """Prompt lookup decoding (A. Saxena, 2023), proposal for proposal as transformers has it.

        The longest n-gram of at most `max_ngram` tokens that ends the text and stands earlier in
        it is looked up; up to `num_tokens` tokens that follow its leftmost occurrence are drafted,
        whatever they cost. Predictions are not used.
        """
        return cls(
            lookahead=num_tokens,
            max_ngram=max_ngram,
            max_request_tokens=max_request_tokens,
            max_bytes=max_bytes,
        )

    def __post_init__(self) -> None:
        _check_integer("lookahead", self.lookahead, 1, 2**16)
        if self.max_ngram is not None:
            _check_integer("max_ngram", self.max_ngram, 1, 2**16)
        _check_integer("max_request_tokens", self.max_request_tokens, 1, MAX_REQUEST_TOKENS)
        if self.max_bytes is not None:
            _check_integer("max_bytes", self.max_bytes, 1, 2**62)
        if not isinstance(self.token_cost, (int, float)) or not 0 <= self.token_cost < math.inf:
            raise InvalidValueError(
                f"token_cost must be a finite number of at least 0, got {self.token_cost!r}"
            )


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise InvalidValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise InvalidValueError(f"{name} must be at most {most}, got {value}")
