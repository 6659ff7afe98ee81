"""The n-gram autocomplete, held against its oracle and its paper's example."""

from __future__ import annotations

import numpy as np
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
