"""The text that a grammar forces: offers from the matchers of xgrammar and llguidance.

Where an answer is held to a JSON schema or another grammar, much of its text has no alternative:
the names of properties, the punctuation between them. The grammar's matcher knows that text, and
the engine drafts it:

    from fastdraft.grammars import ForcedText

    forced = ForcedText(tokenizer)
    drafts = engine.propose_batch(requests, offers=forced.offers(matchers))

Where the forced text ends, its last token is open: what follows may be written with it in one
token. So that token is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastdraft.engine import Offers
from fastdraft.errors import InvalidValueError

__all__ = ["ForcedText"]

_LONGEST: Final = 512
"""The most characters that are tokenized in a step; a step drafts fewer tokens."""
_BEFORE: Final = "\x02"
"""Some tokenizers put a space before a text: one that begins so shows what is put before it."""


class ForcedText:
    """The tokens of text that grammars force.

    Calls may overlap, those on one matcher may not.

    Args:
        tokenizer: One of transformers, or what is called as one. Not needed for matchers of
            llguidance, which know their tokenizer.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._before = [] if tokenizer is None else self._encode(_BEFORE)

    def token_ids(self, matcher: Any) -> list[int]:
        """The tokens that have to come next, without the last one; [] for none.

        O(length of the text), 25 to 60 us. The matcher stays as it is.

        Args:
            matcher: A `GrammarMatcher` of xgrammar, or an `LLMatcher` of llguidance, that has
                accepted the answer so far.

        Raises:
            InvalidValueError: `matcher` is neither, or is xgrammar's and there is no tokenizer.
        """
        if hasattr(matcher, "compute_ff_tokens"):
            # llguidance leaves out the last token itself.
            ended = matcher.is_stopped() or matcher.is_error()
            return [] if ended else [int(token) for token in matcher.compute_ff_tokens()]
        if not hasattr(matcher, "find_jump_forward_string"):
            raise InvalidValueError(
                "matcher must be a GrammarMatcher of xgrammar or an LLMatcher of llguidance, got "
                f"{matcher!r}"
            )
        if self._tokenizer is None:
            raise InvalidValueError("tokenizer must be given for matchers of xgrammar, got None")
        if matcher.is_terminated():
            return []
        text = matcher.find_jump_forward_string()[:_LONGEST]
        return self._continuation(text)[:-1] if text else []

    def offers(self, matchers: Sequence[Any], *, kind: str = "grammar") -> Offers | None:
        """An offer for the next step of each row of a batch.

        Args:
            matchers: Each row's, as for `token_ids`; None for a row without a grammar.
            kind: Of the offers.

        Returns:
            None where nothing is forced in any row.

        Raises:
            InvalidValueError: As `token_ids`.
        """
        rows = [[] if each is None else self.token_ids(each) for each in matchers]
        if not any(rows):
            return None
        return Offers.of_rows(kind, rows, confidences=[[1.0] * len(row) for row in rows])

    def _continuation(self, text: str) -> list[int]:
        """The tokens of a text that follows another one."""
        token_ids = self._encode(_BEFORE + text)
        before = len(self._before)
        if token_ids[:before] == self._before:
            return token_ids[before:]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
