"""Which samples of each prompt a full store keeps: lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MOST_MOVED = (1 << 16) + 64


class Sample(NamedTuple):
    start: int  # the position of its mark
    prompt: tuple[int, ...]
    tokens: list[int]


class Samples(NamedTuple):
    """A store's log from its beginning, and those of its documents that count as samples."""

    log: tuple[Sample, ...] = ()
    held: tuple[Sample, ...] = ()
    may_move: int = 0

    @property
    def end(self) -> int:
        return self.log[-1].start + 1 + len(self.log[-1].tokens) if self.log else 0

    def count(self, prompt: tuple[int, ...]) -> int:
        return sum(each.prompt == prompt for each in self.held) if prompt else 0

    def average(self) -> int:
        """How many samples the prompts have, rounded."""
        prompts = len({each.prompt for each in self.held})
        return (len(self.held) + prompts // 2) // prompts

    def enter(self, prompt: tuple[int, ...], tokens: list[int]) -> Samples:
        new = (Sample(self.end, prompt, tokens),)
        return self._replace(log=self.log + new, held=self.held + new * bool(prompt))

    def outcomes(self, prompt: tuple[int, ...], tokens: list[int], begin: int) -> Iterator[Samples]:
        """The states that may be after a document of a prompt, or of none, is added to a store that
        holds what stands from `begin` on: after each decision there may be room enough."""
        may_move = min(self.may_move + len(tokens), MOST_MOVED)
        now = Samples(self.log, tuple(e for e in self.held if e.start >= begin), may_move)
        moved: list[Sample] = []

        def after(*, enters: bool) -> Samples:
            then = now
            for each in moved:
                then = then.enter(each.prompt, each.tokens)
            return then.enter(prompt, tokens) if enters else then

        yield after(enters=True)
        while begin and now.held:
            oldest = now.held[0]
            count, others = now.count(prompt), now.count(oldest.prompt)
            if oldest.prompt != prompt and (others <= count or others < now.average()):
                if len(oldest.tokens) <= now.may_move:
                    moved.append(oldest)
                    now = now._replace(may_move=now.may_move - len(oldest.tokens))
                elif others < count:
                    yield after(enters=False)
                    return
            now = now._replace(held=now.held[1:])
            yield after(enters=True)
