"""Grammars in a generation: only tokens that they allow, and drafts of text that they force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor

from fastdraft.errors import InvalidValueError
from fastdraft.grammars import ForcedText
from fastdraft.hf.device import on_device

if TYPE_CHECKING:
    from fastdraft.engine import Offers

__all__ = ["Grammar"]


class Grammar(LogitsProcessor):
    """Holds answers to a grammar, as one of the `logits_processor` of `generate`.

    `hf.generate` also drafts the text that the grammar forces. It makes one by itself of
    `xgrammar.contrib.hf.LogitsProcessor`. It serves one generation after another of `hf.generate`;
    transformers' own generation needs a new one for each.

    Args:
        grammar: A `CompiledGrammar` of xgrammar, or an `LLMatcher` of llguidance that has accepted
            nothing yet; or a list with one for each row.
        tokenizer: The model's. Without one, text that xgrammar's grammars force is not drafted.

    Raises:
        InvalidValueError: `grammar` is something else.
    """

    def __init__(self, grammar: Any, tokenizer: Any = None) -> None:
        self._grammars = list(grammar) if isinstance(grammar, (list, tuple)) else [grammar]
        for each in self._grammars:
            if not _is_llguidance(each) and not _is_xgrammar(each):
                raise InvalidValueError(
                    "grammar must be a CompiledGrammar of xgrammar, an LLMatcher of llguidance or "
                    f"a list of them, got {each!r}"
                )
        if not self._grammars:
            raise InvalidValueError("grammar must hold at least one, got an empty list")
        self._forced: ForcedText | None = None
        if tokenizer is not None or all(map(_is_llguidance, self._grammars)):
            self._forced = ForcedText(tokenizer)
        self._rows: list[_Row] = []
        self._start = 0

    @classmethod
    def of(cls, processor: Any, tokenizer: Any) -> Grammar | None:
        """A logits processor as a `Grammar`: itself, or xgrammar's own; None for others."""
        if isinstance(processor, cls):
            return processor
        if type(processor).__module__ == "xgrammar.contrib.hf":
            return cls(processor.compiled_grammars, tokenizer)
        return None

    def begin(self, rows: int, start: int) -> None:
        """Begins a generation.

        Args:
            rows: Of the batch.
            start: The tokens of each prompt, padding included.

        Raises:
            InvalidValueError: There is not one grammar for all rows, nor one for each.
        """
        grammars = self._grammars
        if len(grammars) not in (1, rows):
            raise InvalidValueError(
                f"grammar must be one for all rows or one for each of {rows}, got {len(grammars)}"
            )
        self._rows = [_Row(each) for each in (grammars * rows)[:rows]]
        self._start = start

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """As transformers' own generation calls it."""
        if not self._rows:
            self.begin(*input_ids.shape)
        return self.masked(scores, enumerate(input_ids.tolist()))

    def masked(
        self, scores: torch.Tensor, texts: Iterable[tuple[int, Sequence[int]]]
    ) -> torch.Tensor:
        """The scores with -inf for tokens that the grammar does not allow.

        Args:
            scores: (positions, vocabulary).
            texts: For each position its row, and the text before it with the prompt. Behind a text
                that the grammar does not allow, or that has come to its end, all tokens are.
        """
        positions, vocabulary = scores.shape
        words = -(-vocabulary // 32)
        allowed = np.full((positions, words), -1, np.int32)
        for line, (row, text) in zip(allowed, texts, strict=True):
            if self._rows[row].go_to(text[self._start :]):
                self._rows[row].allow(line)
        (bits,) = on_device(scores.device, allowed)
        shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
        is_allowed = (bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :vocabulary]
        return scores.masked_fill(~is_allowed, -torch.inf)

    def offers(self, texts: Iterable[tuple[int, Sequence[int]]]) -> Offers | None:
        """What the grammar forces behind the texts of some rows, as offers for these rows."""
        if self._forced is None:
            return None
        return self._forced.offers(
            [
                self._rows[row].matcher if self._rows[row].go_to(text[self._start :]) else None
                for row, text in texts
            ]
        )


class _Row:
    """A grammar's matcher that follows the text of a row, back and forth."""

    def __init__(self, grammar: Any) -> None:
        self._words = 0
        if _is_llguidance(grammar):
            self.matcher = grammar.deep_copy()
        else:
            from xgrammar import GrammarMatcher

            self.matcher = GrammarMatcher(grammar)
            self._words = -(-grammar.tokenizer_info.vocab_size // 32)
        self._accepted: list[int] = []

    def go_to(self, text: Sequence[int]) -> bool:
        """Makes the matcher accept this text; False where it does not, or is at its end."""
        accepted = self._accepted
        shared = len(accepted)
        if text[:shared] != accepted:
            pairs = enumerate(zip(accepted, text, strict=False))
            same = min(shared, len(text))
            shared = next((at for at, (own, token) in pairs if own != token), same)
            self.matcher.rollback(len(accepted) - shared)
            del accepted[shared:]
        for token in text[shared:]:
            if self._has_ended() or not self._accept(token):
                return False
            accepted.append(token)
        return not self._has_ended()

    def allow(self, line: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: bit t % 32 of word t // 32 for token t."""
        if self._words:
            bits = torch.full((1, self._words), -1, dtype=torch.int32, device="cpu")
            self.matcher.fill_next_token_bitmask(bits, 0)
            found = bits[0].numpy()
        else:
            found = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        line[:] = 0
        count = min(len(line), len(found))
        line[:count] = found[:count]

    def _has_ended(self) -> bool:
        """Whether the end of the answer has been accepted."""
        # Where llguidance has "stopped", the end is all that may follow, and is still to come.
        return False if not self._words else bool(self.matcher.is_terminated())

    def _accept(self, token: int) -> bool:
        if self._words:
            return bool(self.matcher.accept_token(token))
        return int(self.matcher.try_consume_tokens([token])) == 1


def _is_llguidance(grammar: Any) -> bool:
    return hasattr(grammar, "compute_ff_tokens")


def _is_xgrammar(grammar: Any) -> bool:
    return hasattr(grammar, "tokenizer_info")
