"""Text that running requests have written, for others to draft from: lists and searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdraft.memory.datastore import Occurrence
from oracles.suffixes import alike

ORDERS, LONGEST = (4, 2, 1), 32
SLICE = 128  # tokens that enter in one call
PASSED_OVER = 3  # own occurrences, for each that is looked at


@dataclass
class Text:
    """A request's text, and what of it has entered: tokens[begin:entered]."""

    tokens: list[int]
    prompt_size: int
    entered: int

    @property
    def begin(self) -> int:
        return max(0, self.prompt_size - LONGEST)


class RunningTexts:
    """The texts of the requests that run on one live store."""

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}
        self.entered: list[tuple[int, int]] = []  # request and index, as they arrived

    def add(self, request: int, prompt: Sequence[int]) -> None:
        self.texts[request] = Text(list(prompt), len(prompt), len(prompt))

    def observe(self, request: int, emitted: Sequence[int]) -> None:
        text = self.texts[request]
        text.tokens += emitted
        if len(self.texts) > 1:
            end = min(len(text.tokens), text.entered + SLICE)
            self.entered += [(request, index) for index in range(text.entered, end)]
            text.entered = end

    def end(self, request: int) -> None:
        del self.texts[request]
        self.entered = [entry for entry in self.entered if entry[0] != request]

    def others(self, request: int) -> Others:
        return Others(self, request)


@dataclass(frozen=True)
class Others:
    """The texts that a request sees, with the methods of a `Datastore`."""

    running: RunningTexts
    request: int

    def find(self, text: Sequence[int], *, most: int, links: int, least: int) -> list[Occurrence]:
        found: list[Occurrence] = []
        passed, longer = PASSED_OVER * links, LONGEST + 1
        for order in ORDERS:
            if order < least or links == 0 or len(found) >= most:
                break
            for position, (request, index) in reversed(list(enumerate(self.running.entered))):
                of = self.running.texts[request]
                before = of.tokens[of.begin : index]
                if order > len(text) or before[-order:] != list(text[-order:]):
                    continue
                if links == 0 or (len(found) >= most and found[most - 1].length == LONGEST):
                    break
                if request == self.request:
                    passed -= 1
                    if passed < 0:
                        break
                    continue
                links -= 1
                length = min(LONGEST, alike(before, text))
                if length < longer:
                    found.append(Occurrence(position, length, True))
                    found.sort(key=lambda occurrence: -occurrence.length)
                    del found[most:]
            longer = order
        return found

    def read(self, position: int, most: int) -> np.ndarray:
        request, index = self.running.entered[position]
        text = self.running.texts[request]
        return np.array(text.tokens[index : min(index + most, text.entered)], dtype=np.int32)
