"""Predicted outputs as the hosted service drafts them, and the default drafter beside them.

The counts are those of the report that reverse-engineered the service. Its examples list the
alphabet; it shows their counts, not their drafts, and five tokens in each draft is the reading by
which all of them follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft import DraftConfig, DraftStats, Engine, Source
from oracles.predicted_outputs import PredictedOutputs

A, B, C, D, E, F = range(1, 7)
X = 9999
ALPHABET = list(range(1, 27))
PAIRS = list(range(100, 158))
LOOKAHEAD, RECOVERY = 16, 32
SERVICE = DraftConfig.predicted_outputs()
DEFAULT = DraftConfig(token_cost=0.0)


class Decoded:
    """One output, decoded greedily by a target that writes `output` whatever is drafted."""

    def __init__(self, config: DraftConfig, prediction: list[int], output: list[int]) -> None:
        engine = Engine(config)
        request = engine.add_request([0], prediction=prediction)
        self.drafts: list[list[int]] = []
        self.accepted: list[bool] = []  # of each output token: whether a draft held it
        while len(self.accepted) < len(output):
            rest = output[len(self.accepted) :]
            draft = engine.propose(request).tolist()
            accepted = common_prefix(draft, rest)
            engine.observe(request, rest[: accepted + 1])
            self.drafts.append(draft)
            self.accepted += [True] * accepted + [False] * (accepted < len(rest))
        self.stats: DraftStats = engine.finish(request)

    @property
    def counts(self) -> tuple[int, int]:
        return self.stats.accepted_prediction_tokens, self.stats.rejected_prediction_tokens

    def resumed_after(self, position: int) -> int:
        """How many output tokens from `position` on the target had to emit itself."""
        return self.accepted[position:].index(True)


def common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@pytest.mark.parametrize(
    ("prediction", "counts"),
    [
        pytest.param([A, B, C, D, E], (5, 0), id="correct"),
        pytest.param([A, B, C, X, D], (3, 2), id="added"),
        pytest.param([A, B, C, E, F], (3, 2), id="missing"),
        pytest.param([A, B, C, X, E], (3, 2), id="replaced"),
    ],
)
def test_the_reports_short_examples(prediction: list[int], counts: tuple[int, int]) -> None:
    assert Decoded(SERVICE, prediction, ALPHABET).counts == counts


def test_the_extra_token_of_a_whole_window_counts_as_neither() -> None:
    decoded = Decoded(SERVICE, PAIRS, PAIRS)
    assert decoded.counts == (55, 0)
    assert [len(draft) for draft in decoded.drafts] == [16, 16, 16, 7]
    assert decoded.stats.accepted == 55
    assert decoded.stats.emitted == 58


@pytest.mark.parametrize("bifurcation", range(len(PAIRS)))
def test_one_bifurcation_rejects_a_window_at_most(bifurcation: int) -> None:
    prediction = PAIRS[:bifurcation] + [X] * (len(PAIRS) - bifurcation)
    decoded = Decoded(SERVICE, prediction, PAIRS)
    # Windows accepted whole take 17 tokens each; the target's own may be what leaves the draft.
    whole, accepted = divmod(bifurcation, LOOKAHEAD + 1)
    window = min(LOOKAHEAD, len(PAIRS) - whole * (LOOKAHEAD + 1))
    assert decoded.counts == (whole * LOOKAHEAD + accepted, window - accepted)
    assert decoded.counts[1] <= LOOKAHEAD


@pytest.mark.parametrize(
    ("edit", "waits"),
    [
        pytest.param(lambda text: [*text[:20], X, X, X, *text[20:]], 3 + RECOVERY, id="inserted"),
        pytest.param(lambda text: text[:20] + text[23:], RECOVERY, id="deleted"),
        pytest.param(lambda text: [*text[:20], X, *text[21:]], 1 + RECOVERY, id="replaced"),
    ],
)
def test_it_waits_until_enough_tokens_line_up(
    edit: Callable[[list[int]], list[int]], waits: int
) -> None:
    prediction = list(range(200))
    output = edit(prediction)
    decoded = Decoded(SERVICE, prediction, output)
    assert decoded.resumed_after(20) == waits
    assert decoded.accepted[: 20 + waits + 17].count(True) == 16 + 3 + 16
    assert decoded.counts[1] == 16 - 3  # tokens 17, 18, 19 of the second window were accepted


def tokens(most: int) -> st.SearchStrategy[list[int]]:
    return st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top - 1), max_size=most))


@given(
    tokens(60), tokens(10), st.lists(tokens(5), max_size=30), st.integers(1, 6), st.integers(1, 8)
)
def test_it_is_the_oracles(
    prediction: list[int],
    prompt: list[int],
    steps: list[list[int]],
    lookahead: int,
    recovery: int,
) -> None:
    engine = Engine(DraftConfig.predicted_outputs(lookahead, recovery))
    request = engine.add_request(prompt, prediction=prediction)
    expected = PredictedOutputs(prediction, recovery)
    accepted = rejected = 0
    for emitted in steps:
        draft = engine.propose(request)
        assert draft.tolist() == expected.draft(lookahead)
        assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
        assert set(draft.sources.tolist()) <= {Source.PREDICTION}
        assert (draft.probabilities == 1).all()
        assert engine.propose_batch([request], limits=[2]).tolist() == [draft.tolist()[:2]]
        assert engine.propose(request).tolist() == draft.tolist()
        # Half of the steps follow the draft for a while.
        if len(emitted) % 2:
            emitted = draft.tolist()[: len(emitted)] + emitted
        engine.observe(request, emitted)
        if emitted:
            accepted += common_prefix(draft.tolist(), emitted)
            rejected += len(draft) - common_prefix(draft.tolist(), emitted)
        for token in emitted:
            expected.advance(token)
    stats = engine.finish(request)
    assert stats.accepted_prediction_tokens == stats.accepted == accepted
    assert stats.rejected_prediction_tokens == rejected


# The default drafter on the same ground.


@pytest.mark.parametrize(
    ("edit", "end"),
    [
        pytest.param(lambda text: text[:50] + [X] * 4 + text[50:], 54, id="inserted"),
        pytest.param(lambda text: text[:50] + [X] * 40 + text[50:], 90, id="many inserted"),
        pytest.param(lambda text: text[:50] + text[53:], 50, id="deleted"),
        pytest.param(lambda text: text[:50] + text[150:], 50, id="many deleted"),
        pytest.param(lambda text: [*text[:50], X, *text[51:]], 51, id="replaced"),
        pytest.param(lambda text: text[:50] + [X] * 20 + text[70:], 70, id="many replaced"),
        pytest.param(lambda text: [X] * 5 + text, 5, id="a preamble"),
        pytest.param(lambda text: text[60:], 0, id="beginning deleted"),
    ],
)
def test_the_default_drafter_resumes_at_once(
    edit: Callable[[list[int]], list[int]], end: int
) -> None:
    prediction = list(range(1000, 1300))
    output = edit(prediction)
    default = Decoded(DEFAULT, prediction, output)
    service = Decoded(SERVICE, prediction, output)
    assert default.resumed_after(end) <= 1
    assert service.resumed_after(end) >= RECOVERY
    assert default.stats.steps + RECOVERY * 3 // 4 <= service.stats.steps


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [3, 2, 1, 0], [0, 0, 2, 2], [1, 3]])
def test_the_default_drafter_follows_blocks_in_any_order(order: list[int]) -> None:
    blocks = [list(range(1000 * block, 1000 * block + 60)) for block in range(1, 5)]
    prediction = list(chain(*blocks))
    output = list(chain(*(blocks[block] for block in order)))
    default, service = Decoded(DEFAULT, prediction, output), Decoded(SERVICE, prediction, output)
    for begin in range(60, len(output), 60):
        assert default.resumed_after(begin) <= 1
    assert default.stats.steps < service.stats.steps / 2


def test_the_default_drafter_needs_fewer_steps_on_edited_text() -> None:
    # Bytes of a real file: every token stands at many positions.
    text = list(Path(__file__).read_bytes())[:3000]
    steps = {DEFAULT: 0, SERVICE: 0}
    for number in range(10):
        rng = random.Random(number)
        output = list(text)
        for position in sorted(rng.sample(range(len(text)), 12), reverse=True):
            cut = rng.randrange(6)
            output[position : position + cut] = rng.choices(text, k=rng.randrange(6))
        for config in steps:
            decoded = Decoded(config, text, output)
            assert decoded.stats.emitted == len(output)
            steps[config] += decoded.stats.steps
    assert steps[DEFAULT] < steps[SERVICE] / 1.5
