"""The record of a draft head beside lookups, against the same in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from fastdraft.serving.vllm.v2.head_record import BINS, HeadRecord

LOOKAHEAD = 3
GUESSED = 4.0


def expected(steps: list[list[tuple[list[int], list[int], int, list[int], int]]]) -> list[float]:
    """The table after steps of rows: a head's draft, a looked-up one, the bin where they differ,
    what was emitted then and how many draft tokens were verified."""
    tried, right = [0.0] * LOOKAHEAD, [0.0] * LOOKAHEAD
    differed, first = [0.0] * BINS, [[0.0] * BINS, [0.0] * BINS]
    for rows in steps:
        decay = 0.5 ** (len(rows) / 512)
        for values in (differed, *first):
            values[:] = [decay * value for value in values]
        for i in range(LOOKAHEAD):
            # A depth forgets by the rows that judge it.
            judged = sum(i < min(len(emitted), verified) for *_, emitted, verified in rows)
            tried[i] *= 0.5 ** (judged / 512)
            right[i] *= 0.5 ** (judged / 512)
        for head, lookup, where, emitted, verified in rows:
            for i, token in enumerate(emitted[:verified]):
                if head[:i] != emitted[:i]:
                    break
                tried[i] += 1
                right[i] += head[i] == token
                if i < len(lookup) and head[:i] == lookup[:i] and head[i] != lookup[i]:
                    differed[where] += 1
                    first[0][where] += lookup[i] == token
                    first[1][where] += head[i] == token
    probability, table = 0.6, []
    for i in range(LOOKAHEAD):
        probability = (right[i] + GUESSED * probability) / (tried[i] + GUESSED)
        table.append(probability)
    for side in range(2):
        for i in range(BINS):
            predicted, head = (i + 0.5) / BINS, table[0]
            guess = (predicted * (1 - head), head * (1 - predicted))[side] / (1 - predicted * head)
            table.append((first[side][i] + GUESSED * guess) / (differed[i] + GUESSED))
    return table


def test_emitted_tokens_teach_of_both_drafts() -> None:
    generator = np.random.default_rng(5)
    record = HeadRecord(LOOKAHEAD, 4)
    texts: list[list[int]] = [[] for _ in range(4)]
    numbers = np.array([1, 2, 3, 4])
    drafts: list[tuple[list[int], list[int], int]] = [([], [], -1)] * 4
    steps = []
    for step in range(200):
        slots = generator.permutation(4)[: generator.integers(1, 5)]
        emitted, verified, rows, written = [], [], [], []
        for slot in slots.tolist():
            if generator.random() < 0.1:
                # Another request takes the slot.
                numbers[slot], texts[slot] = 5 + step * 4 + slot, [0] * 9
                drafts[slot] = ([], [], -1)
            tokens = generator.integers(0, 2, generator.integers(0, 5)).tolist()
            most = int(generator.integers(0, LOOKAHEAD + 1))
            head, lookup, where = drafts[slot]
            if head:
                rows.append((head, lookup, where, tokens, most))
            texts[slot] += tokens
            emitted.append(len(tokens))
            verified.append(most)
            head = generator.integers(0, 2, LOOKAHEAD).tolist()
            lookup = generator.integers(0, 2, generator.integers(0, LOOKAHEAD + 1)).tolist()
            differ = head[: len(lookup)] != lookup
            where = int(generator.integers(0, BINS)) if differ else -1
            drafts[slot] = head, lookup, where
            written.append([where, *head, *lookup, *[-1] * (LOOKAHEAD - len(lookup))])
        tails = [([-1] * 8 + texts[slot])[-8:] for slot in slots]
        lengths = np.array([len(texts[slot]) for slot in slots])
        record.observe(
            slots,
            numbers[slots],
            np.array(emitted),
            lengths,
            np.array(verified),
            np.array(written, dtype=np.int32),
            np.array(tails, dtype=np.int32),
        )
        steps.append(rows)
    np.testing.assert_allclose(record.table(), expected(steps), rtol=1e-5)


def test_a_lost_step_teaches_nothing() -> None:
    record = HeadRecord(LOOKAHEAD, 1)
    before = record.table()
    one = np.array([1])
    draft = np.array([[-1, 7, 8, 9, -1, -1, -1]], dtype=np.int32)
    tails = np.array([[1, 7, 8, 9]], dtype=np.int32)

    def observe(emitted: int, length: int) -> None:
        record.observe(
            np.array([0]), one, np.array([emitted]), np.array([length]), one * 3, draft, tails
        )

    observe(1, 10)
    # Three tokens were emitted, but the text has grown by four.
    observe(3, 14)
    assert record.table().tolist() == pytest.approx(before.tolist())
    observe(3, 17)
    assert record.table()[0] > before[0]
