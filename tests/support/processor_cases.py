"""Batches of requests with logits processors, for the tests of the reference and of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fastdraft.verification import Processors

INF = float("inf")


@dataclass
class Case:
    """One request: its text, its processors, and its draft as (parent, token) pairs."""

    prompt: list[int]
    output: list[int]
    draft: list[tuple[int, int]] = field(default_factory=list)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[list[int]] | None = None
    min_tokens: int = 0
    stop_ids: list[int] | None = None

    def path(self, slot):
        """The draft tokens that lead to a slot."""
        tokens = []
        node = slot - 1
        while node >= 0:
            node, token = self.draft[node]
            tokens.insert(0, token)
        return tokens

    def processed(self, row, slot):
        """What plain decoding would make of the logits after text and path, as plain numbers."""
        output = self.output + self.path(slot)
        row = list(row)
        for token, value in (self.logit_bias or {}).items():
            if token < len(row):
                row[token] += value
        for token in range(len(row)):
            count = output.count(token)
            if count or token in self.prompt:
                above = row[token] > 0
                penalty = self.repetition_penalty
                row[token] = row[token] / penalty if above else row[token] * penalty
            row[token] -= self.frequency_penalty * count
            if count:
                row[token] -= self.presence_penalty
        text = self.prompt + output
        for *before, last in self.bad_words or []:
            if last < len(row) and text[len(text) - len(before) :] == before:
                row[last] = -INF
        for token in self.stop_ids or []:
            if token < len(row) and len(output) < self.min_tokens:
                row[token] = -INF
        return row


def random_case(rng, *, vocabulary, longest=6, tree=False, out_of_range=True):
    """A request whose penalties are exact in binary, so that every order of rounding agrees."""
    high = vocabulary + 2 if out_of_range else vocabulary
    low = -2 if out_of_range else 0

    def ids(most, least=0):
        return [rng.randrange(high) for _ in range(rng.randint(least, most))]

    def maybe(value):
        return value if rng.random() < 0.5 else None

    prompt = ids(6, 1)
    draft = []
    for node in range(rng.randint(0, longest)):
        parent = rng.randrange(-1, node) if tree else node - 1
        draft.append((parent, rng.randrange(low, high)))
    return Case(
        prompt=prompt,
        output=ids(6),
        draft=draft,
        repetition_penalty=rng.choice([1.0, 1.0, 2.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, 0.75, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.25, -1.0]),
        logit_bias=maybe({token: rng.choice([-4.0, 0.5, 3.0]) for token in ids(3)}),
        bad_words=maybe([ids(4, 1) for _ in range(rng.randint(0, 3))]),
        min_tokens=rng.choice([0, 3, 8, 10]),
        stop_ids=maybe(ids(2)),
    )


def processors_of(cases, **options):
    return Processors.from_requests(
        [case.prompt for case in cases],
        [case.output for case in cases],
        repetition_penalty=[case.repetition_penalty for case in cases],
        presence_penalty=[case.presence_penalty for case in cases],
        frequency_penalty=[case.frequency_penalty for case in cases],
        logit_bias=[case.logit_bias for case in cases],
        bad_words=[case.bad_words for case in cases],
        min_tokens=[case.min_tokens for case in cases],
        stop_ids=[case.stop_ids for case in cases],
        **options,
    )


def batch_of(cases):
    """draft_ids, offsets, parents."""
    nodes = [node for case in cases for node in case.draft]
    offsets = torch.tensor([0, *(len(case.draft) for case in cases)]).cumsum(0)
    ids = torch.tensor([token for _, token in nodes], dtype=torch.int32)
    parents = torch.tensor([parent for parent, _ in nodes], dtype=torch.int32)
    return ids, offsets, parents


def processed(cases, logits):
    """The logits of a batch, (rows, vocabulary), processed row by row."""
    rows = iter(logits.tolist())
    return torch.tensor(
        [case.processed(next(rows), slot) for case in cases for slot in range(len(case.draft) + 1)],
        dtype=logits.dtype,
    )
