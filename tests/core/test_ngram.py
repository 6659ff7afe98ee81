"""The n-gram autocomplete, held against its oracle and against its paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import DraftConfig, Engine, Source
from oracles.ngram import NgramModel


def texts(most: int) -> st.SearchStrategy[list[int]]:
    """Small alphabets and repeats, so that contexts of every length recur."""
    letters = st.integers(1, 4).flatmap(
        lambda top: st.lists(st.integers(0, top - 1), max_size=most)
    )
    repeats = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 10))
    return st.one_of(letters, repeats.map(lambda parts: (parts[0] * parts[1])[:most]))


@settings(max_examples=200)
@given(
    texts(60),
    st.lists(texts(5), max_size=10),
    st.integers(1, 6),
    st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 0.5, 1 / 3])),
    st.integers(1, 20),
)
def test_it_is_the_oracles(
    prompt: list[int],
    steps: list[list[int]],
    order: int,
    min_probability: float,
    lookahead: int,
) -> None:
    engine = Engine(DraftConfig.ngram(order, min_probability, lookahead=lookahead))
    request = engine.add_request(prompt, prediction=[1, 2, 3])
    model = NgramModel(prompt, order)
    text = list(prompt)
    for emitted in steps:
        expected = model.suggest(text, min_probability, lookahead)
        draft = engine.propose(request)
        assert draft.tolist() == [token for token, _ in expected]
        assert draft.probabilities.tolist() == [float(np.float32(path)) for _, path in expected]
        assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
        assert set(draft.sources.tolist()) <= {Source.CONTEXT}
        batch = engine.propose_batch([request], limits=[3], token_cost=1e9)
        assert batch.tolist() == [draft.tolist()[:3]]
        engine.observe(request, emitted)
        text += emitted


def test_the_papers_example() -> None:
    words = ["Who", "was", "the", "director", "of", "Harry", "Potter", "and", "the", "Deathly"]
    words += ["Hallows", "?"]
    prompt = [words.index(word) for word in words]
    engine = Engine(DraftConfig.ngram())
    request = engine.add_request(prompt)
    # "The" is not in the prompt, so "director of" alone is what it goes on after.
    engine.observe(request, [999, words.index("director"), words.index("of")])
    suggested = [words[token] for token in engine.propose(request).tolist()]
    assert suggested == ["Harry", "Potter", "and", "the", "Deathly", "Hallows", "?"]
    # The target deviates at the question mark.
    engine.observe(request, [words.index(word) for word in suggested[:-1]] + [998])
    stats = engine.finish(request)
    assert (stats.drafted, stats.accepted) == (7, 6)


def toy_target(vocabulary: int) -> Callable[[list[int]], Any]:
    """Logits of the next token, of shape (vocabulary,), by a text's last two tokens."""
    import torch

    table = torch.randn(
        (vocabulary, vocabulary, vocabulary), generator=torch.Generator().manual_seed(5)
    )
    return lambda text: 2.5 * table[text[-2], text[-1]]


def test_sampled_verification_draws_what_algorithm_1_draws() -> None:
    torch = pytest.importorskip("torch")
    from fastdraft.verification import verify_sampled

    vocabulary, length = 6, 60
    target = toy_target(vocabulary)
    prompt = np.random.default_rng(3).integers(0, vocabulary, 80).tolist()
    config = DraftConfig.ngram(3, 0.2)
    model = NgramModel(prompt, 3)

    def verify(text: list[int], draft: list[int], seed: int) -> list[int]:
        rows = [target(text + draft[:i]) for i in range(len(draft) + 1)]
        return verify_sampled(
            torch.stack(rows),
            torch.tensor(draft, dtype=torch.int32),
            torch.tensor([0, len(draft)]),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([len(text)]),
        ).tolist()[0]

    def algorithm_1(seed: int) -> list[int]:
        """The paper's listing, with the exit from its inner loop that its text describes."""
        generated = list(prompt)
        while len(generated) < len(prompt) + length:
            suggested = [token for token, _ in model.suggest(generated, 0.2, 16)]
            for token in suggested or [None]:
                sampled = verify(generated, [], seed)[0]
                generated.append(sampled)
                if sampled != token:
                    break
        return generated[: len(prompt) + length]

    accepted = 0
    for seed in range(6):
        engine = Engine(config)
        request = engine.add_request(prompt)
        text = list(prompt)
        while len(text) < len(prompt) + length:
            emitted = verify(text, engine.propose(request).tolist(), seed)
            engine.observe(request, emitted)
            text += emitted
        assert text[: len(prompt) + length] == algorithm_1(seed)
        stats = engine.finish(request)
        assert stats.steps < stats.emitted
        accepted += stats.accepted
    assert accepted > 50
