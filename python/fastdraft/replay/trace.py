"""The steps of a request: the draft, its probabilities and sources, acceptance.

Every picture of a request is drawn from a `Trace`: the coloured text in a terminal, as SVG and in a
notebook, and the page in a browser. Importing this module needs numpy alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from fastdraft.engine import Source
from fastdraft.stats import DraftStats

__all__ = [
    "DRAFT",
    "ORIGINS",
    "TARGET",
    "Decode",
    "Step",
    "Trace",
    "accepted_path",
    "accepted_prefix",
    "draft_texts",
    "origin_of",
    "token_texts",
]

TARGET = "target"
"""The origin of a token that no draft held."""

DRAFT = "draft"
"""The origin of a drafted token where the drafter does not tell its source."""

ORIGINS = (TARGET, "context", "prediction", "datastore", DRAFT)
"""All origins of a token."""

_ORIGINS = {
    Source.CONTEXT: "context",
    Source.TEMPLATE: "context",
    Source.PREDICTION: "prediction",
    Source.DATASTORE: "datastore",
    Source.READ_ONLY: "datastore",
    Source.RUNNING: "datastore",
    Source.NGRAMS: "datastore",
}

Decode = Callable[["list[int]"], str]
"""Turns token ids into their text."""

# Longer runs of bytes are no character in the making.
_MOST_CHARACTER_TOKENS = 8

# Background, underline: by colour, and not by colour alone. Readable on light and on dark pages,
# since the text on it is always black.
_STYLES = {
    "context": "background:#a6e3a1;border-bottom:2px solid #2b7a3d",
    "prediction": "background:#f6d97a;border-bottom:2px dashed #8a6100",
    "datastore": "background:#9fd8f0;border-bottom:2px dotted #0b5f86",
    "draft": "background:#e3c4f2;border-bottom:2px solid #7a3f98",
}


def origin_of(source: int) -> str:
    """The origin that a draft token's source is shown as, of `ORIGINS`."""
    return _ORIGINS[Source(source)] if source < Source.OFFER else DRAFT


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], output: Sequence[int], done: int = 0
) -> list[int]:
    """The nodes of a draft that the output follows from position `done` on, from the root down.

    A parent stands before its children, and siblings have different tokens. O(nodes).
    """
    path: list[int] = []
    last, position, end = -1, done, len(output)
    for node, parent in enumerate(parents):
        if parent == last and position < end and tokens[node] == output[position]:
            path.append(node)
            last = node
            position += 1
    return path


def accepted_prefix(tokens: Sequence[int], output: Sequence[int], done: int = 0) -> int:
    """How many tokens of a chain the output follows from position `done` on."""
    return len(accepted_path(tokens, range(-1, len(tokens) - 1), output, done))


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the draft, and what the target made of it.

    Attributes:
        token_ids: The draft's tokens; none where nothing was drafted.
        parents: For each token the index of its parent, -1 for the text's last token.
        sources: Where each token was found, of `ORIGINS`.
        probabilities: For each token the estimated probability that it and all before it on its
            path are accepted; None where the drafter does not estimate it.
        accepted: The indices of the accepted tokens, from the root down.
        emitted: The tokens that the step added to the text: the accepted ones, and the target's own
            unless the output ended before.
    """

    token_ids: list[int]
    parents: list[int]
    sources: list[str]
    probabilities: list[float] | None
    accepted: list[int]
    emitted: list[int]

    @property
    def origins(self) -> list[str]:
        """The origin of each emitted token, of `ORIGINS`."""
        drafted = [self.sources[node] for node in self.accepted]
        return drafted + [TARGET] * (len(self.emitted) - len(drafted))

    @property
    def is_chain(self) -> bool:
        """True if no token has a sibling."""
        return self.parents == list(range(-1, len(self.parents) - 1))


@dataclass(frozen=True)
class Trace:
    """One request, step by step. Notebooks show it as text, coloured by origin.

    Attributes:
        name: The request's.
        title: What drafted, and how.
        prompt_ids: The prompt's tokens.
        first_ids: The output tokens of the prompt's forward.
        decode: Turns token ids into text; None where only the ids are known.
        steps: The steps after the prompt's forward.
    """

    name: str
    title: str
    prompt_ids: list[int]
    first_ids: list[int]
    decode: Decode | None = field(default=None, repr=False, compare=False)
    steps: list[Step] = field(default_factory=list, repr=False)

    @property
    def output_ids(self) -> list[int]:
        """The tokens of the output."""
        return [*self.first_ids, *(token for step in self.steps for token in step.emitted)]

    @property
    def origins(self) -> list[str]:
        """The origin of each token of the output, of `ORIGINS`."""
        later = [origin for step in self.steps for origin in step.origins]
        return [TARGET] * len(self.first_ids) + later

    @property
    def stats(self) -> DraftStats:
        """The counts of all steps, without those of predictions."""
        return DraftStats(
            steps=len(self.steps),
            emitted=sum(len(step.emitted) for step in self.steps),
            drafts=sum(bool(step.token_ids) for step in self.steps),
            drafted=sum(len(step.token_ids) for step in self.steps),
            accepted=sum(len(step.accepted) for step in self.steps),
        )

    @property
    def summary(self) -> str:
        """The counts in one sentence."""
        stats = self.stats
        return (
            f"{len(self.output_ids)} tokens, {stats.steps} steps after the prefill, "
            f"{stats.mean_accepted_tokens:.2f} tokens a step; "
            f"drafted {stats.drafted}, accepted {stats.accepted}"
        )

    def parts(self) -> list[tuple[str, str]]:
        """The output's text as pairs of origin and text, cut where the origin changes."""
        texts = iter(token_texts(self.output_ids, self.decode))
        return [
            (origin, "".join(next(texts) for _ in group)) for origin, group in groupby(self.origins)
        ]

    def _repr_html_(self) -> str:
        def marked(origin: str, text: str) -> str:
            text = escape(text)
            if origin == TARGET:
                return text
            style = f"color:#000;border-radius:2px;{_STYLES[origin]}"
            return f'<span title="{origin}" style="{style}">{text}</span>'

        counts = Counter(self.origins)
        legend = " &nbsp; ".join(
            f"{marked(origin, origin)} {counts[origin]}" for origin in ORIGINS if counts[origin]
        )
        text = "".join(marked(*part) for part in self.parts())
        return (
            f"<div><b>{escape(self.name)}</b>: {escape(self.title)}"
            f'<pre style="white-space:pre-wrap;line-height:1.6">{text}</pre>'
            f"Tokens from: {legend}<br>{escape(self.summary)}</div>"
        )


def token_texts(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text that each token adds to those before it; together they are the whole text.

    The last token of a character that takes several has all of it, the others have nothing. Without
    `decode` the ids themselves are the text. O(tokens).
    """
    if decode is None:
        return [f"{' ' if position else ''}{token}" for position, token in enumerate(ids)]
    texts = []
    # Decoding goes on from the token before, since some tokenizers drop a text's first space.
    before, done = 0, 0
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[before:end]))
        if text.endswith("\ufffd") and end < len(ids) and end - done < _MOST_CHARACTER_TOKENS:
            texts.append("")
            continue
        texts.append(text[len(decode(list(ids[before:done]))) :])
        before, done = done, end
    return texts


def draft_texts(step: Step, last: int | None, decode: Decode | None) -> list[str]:
    """The text of each token of a draft.

    Args:
        step: The step with the draft.
        last: The text's last token, where there is one.
        decode: As for `token_texts`.
    """
    if decode is None:
        return [str(token) for token in step.token_ids]
    texts = []
    for token, parent in zip(step.token_ids, step.parents, strict=True):
        before = last if parent < 0 else step.token_ids[parent]
        known = [] if before is None else [before]
        texts.append(decode([*known, token])[len(decode(known)) if known else 0 :])
    return texts
