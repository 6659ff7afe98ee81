"""How an engine drafts: a frozen configuration, checked when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypedDict

from fastdraft import _core
from fastdraft.memory.ngrams import NgramTable

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "MAX_REQUEST_TOKENS",
    "DraftConfig",
    "NgramAutocomplete",
    "PredictedOutputs",
    "PromptLookup",
]

MAX_REQUEST_TOKENS = _core.MAX_REQUEST_TOKENS
"""The longest text that one request's index can hold."""


class Limits(TypedDict, total=False):
    """Fields of `DraftConfig` that every drafter has."""

    max_request_tokens: int
    max_bytes: int | None
    vocabulary: int | None
    threads: int


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """The drafter of `DraftConfig.prompt_lookup`."""

    max_ngram: int = 3
    """The longest n-gram that is looked up, 1 to 65536 tokens."""


@dataclass(frozen=True, slots=True)
class NgramAutocomplete:
    """The drafter of `DraftConfig.ngram`."""

    order: int = 4
    """The order of the model, 1 to 16."""
    min_probability: float = 0.3
    """The least probability of a draft, 0 to 1."""


@dataclass(frozen=True, slots=True)
class PredictedOutputs:
    """The drafter of `DraftConfig.predicted_outputs`."""

    recovery: int = 32
    """The number of tokens in a row that must occur in the prediction after a mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Chooses a drafter. `DraftConfig()` is the default one.

    The default drafter looks up where the last tokens of the request's text occur elsewhere in it,
    in its prediction and in its datastores, follows the copies that the output makes through
    edits, predicts the acceptance of all tokens that may come next, and drafts a token only while
    it pays for its cost.
    """

    lookahead: int = 64
    """The longest draft, in tokens; of a tree, its longest path."""
    tree_budget: int | None = None
    """Draft trees of at most this many tokens, the most probable ones; None drafts chains. Only the
    default drafter drafts trees."""
    token_cost: float = 0.02
    """The cost of a further token in a target forward, as a fraction of a forward over one token,
    for calls that give no cost of their own. 0 drafts all of the lookahead."""
    ngrams: NgramTable | str | os.PathLike[str] | None = None
    """A table of n-grams to draft from where nothing can be copied, or the path of one, which is
    opened. Only the default drafter takes one; its tokens must be those of the target."""
    objective: Literal["tokens", "last"] = "tokens"
    """The goal that a batch is drafted for. "tokens": the most tokens a second. "last": that
    its last request ends early, as a step of rollouts waits for it. Then the tokens of a row weigh
    more the longer it is expected to take yet, by how long earlier outputs of its prompt were. Only
    for the default drafter; one request alone is drafted for the same."""
    drafter: PromptLookup | NgramAutocomplete | PredictedOutputs | None = None
    """Set by `prompt_lookup`, `ngram` and `predicted_outputs`; None for the default drafter."""
    max_request_tokens: int = MAX_REQUEST_TOKENS
    """The most tokens that one request may hold, and the longest prediction."""
    max_bytes: int | None = None
    """The most bytes that all indexes of the engine may hold together; None: no limit."""
    vocabulary: int | None = None
    """The number of tokens that the target knows: no id from here on is ever drafted, whatever a
    prompt or a datastore holds, and a prediction with one is refused. None: no limit."""
    threads: int = 0
    """How many threads draft for a batch of 128 rows or more, the caller's included; drafts do not
    depend on it. 0: half the processors that the process may use, at most four."""

    @classmethod
    def prompt_lookup(
        cls,
        max_ngram: int = 3,
        num_tokens: int = 10,
        **limits: Unpack[Limits],
    ) -> DraftConfig:
        """Prompt lookup decoding (A. Saxena, 2023), proposal for proposal as transformers has it.

        Finds the longest n-gram of at most `max_ngram` tokens that ends the text and also occurs
        earlier, and drafts up to `num_tokens` tokens that followed its first occurrence, whatever
        they cost. Predictions are not used.
        """
        return cls(lookahead=num_tokens, drafter=PromptLookup(max_ngram), **limits)

    @classmethod
    def ngram(
        cls,
        order: int = 4,
        min_probability: float = 0.3,
        *,
        lookahead: int = 16,
        **limits: Unpack[Limits],
    ) -> DraftConfig:
        """The n-gram autocomplete (J. Kim, K. Kim and A. Oh, Autocomplete Algorithm for Language
        Models, 2024).

        When a request begins, an n-gram model counts how its prompt goes on after every context of
        fewer than `order` tokens (1 to 16); what the paper calls the context, such as search
        results, is part of the prompt. The output is not counted, and predictions are not used. A
        draft grows greedily, by the most frequent continuation of the text so far, while the
        product of the conditional probabilities, count(context, token) / count(context, any
        token), is at least `min_probability` (0 to 1), whatever it costs. The products are the
        draft's `probabilities`.

        What the paper leaves open is decided so. A context that the prompt does not go on after
        backs off, without a discount, to its longest suffix that it does go on after, at last to
        none. Of equally frequent tokens the last one in the prompt is taken. And a draft
        ends at `lookahead` tokens, since on a text of repeats it would never end.

        To verify, the paper's Algorithm 1 draws one token from the target's distribution at each
        draft token in turn, keeps what it drew, and drops the rest of the draft where that is not
        the draft's token (so its text; its listing forgets to leave the loop).
        `verification.verify_sampled` does the same: one draw a row, and the draws up to and with
        the first that is not the draft's are emitted. In both, every emitted token is a draw from
        the target given the tokens before it, so both have the target's distribution, exactly; and
        from the same random numbers they emit the same tokens. Only the steps differ: after a draft
        that was accepted whole, the algorithm draws the next token in its next forward,
        `verify_sampled` already in this one, from the same distribution.

        A proposal costs O(lookahead * order), an observed token O(1) amortised, a prompt O(order) a
        token; the model takes about 50 bytes a prompt token at order 4.
        """
        return cls(lookahead=lookahead, drafter=NgramAutocomplete(order, min_probability), **limits)

    @classmethod
    def predicted_outputs(
        cls,
        lookahead: int = 16,
        recovery: int = 32,
        **limits: Unpack[Limits],
    ) -> DraftConfig:
        """Predicted outputs as the hosted service that named them drafts them, by a report that
        reverse-engineered it in 2024.

        The prediction is drafted from its beginning, `lookahead` tokens a step, whatever they cost.
        Where the output leaves it, within a draft or by the target's own token after one, nothing
        is drafted until `recovery` tokens in a row, all emitted since, occur in the prediction;
        then drafting goes on behind their leftmost occurrence there. Insertions, deletions and
        replacements are all treated so. Without a prediction nothing is drafted, and the
        request's own text is not used: the default drafter resumes at once, and copies from both.

        `DraftStats` counts as the service does: draft tokens that the target emitted are accepted,
        the others rejected, at most `lookahead` of them for each time that the output leaves the
        prediction. The target's own token, of which every window that is accepted whole yields one,
        is neither, even where the prediction holds it.

        A proposal costs O(lookahead), an observed token O(1) amortised.
        """
        return cls(lookahead=lookahead, drafter=PredictedOutputs(recovery), **limits)

    @property
    def takes_offers(self) -> bool:
        """True if the drafter weighs offers and templates: the default one does."""
        return self.drafter is None

    def __post_init__(self) -> None:
        if isinstance(self.ngrams, (str, os.PathLike)):
            object.__setattr__(self, "ngrams", NgramTable.open(self.ngrams))
        _core.check_config(self)

    def __repr__(self) -> str:
        shown = [
            f"{each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
            or each.name in ("lookahead", "token_cost")
        ]
        return f"DraftConfig({', '.join(shown)})"
