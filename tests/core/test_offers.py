"""Guesses from outside: wrong ones, and whether they pay. What is drafted of them is held against
the oracle in test_default_drafter.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from fastdraft import DraftConfig, Engine, Offers, Source, _core
from fastdraft.errors import InvalidValueError


@pytest.mark.parametrize("cost", [None, np.arange(1.0, 60.0)])
@pytest.mark.parametrize("tree_budget", [None, 12])
def test_drawn_tokens_are_drafted_as_they_are(tree_budget: int | None, cost: Any) -> None:
    """However little they promise, beside rows that draft what pays."""
    engine = Engine(DraftConfig(lookahead=4, tree_budget=tree_budget, token_cost=0.9))
    text = [*range(10), *range(6)]
    requests = [engine.add_request(text) for _ in range(3)]
    drawn = [[6, 50, 51], [], [60] * 9]
    sure = [[0.0] * len(row) for row in drawn]
    offers = Offers.of_rows("small", drawn, confidences=sure, drawn=True)
    for padded in (False, True):
        drafts = engine.propose_batch(requests, offers=offers, cost=cost, padded=padded)
        own = drafts.tolist()[1]
        assert own == text[6 : 6 + len(own)]
        assert drafts.tolist() == [[6, 50, 51], own, [60] * 4]
        assert drafts.parents.tolist()[:3] == [-1, 0, 1]
        cut = engine.propose_batch(requests, offers=offers, cost=cost, limits=[2, 0, 1])
        assert cut.tolist() == [[6, 50], [], [60]]
    alone = Offers("small", [50, 51], confidences=[0.0, 0.0], drawn=True)
    assert engine.propose(requests[0], offers=alone, cost=cost).tolist() == [50, 51]


def test_what_an_offer_is_worth_is_learned_beside_the_engines_evidence() -> None:
    """Offers that are right where copies fail, and wrong where copies are right."""
    engine = Engine(DraftConfig(token_cost=0.02))
    random = np.random.default_rng(5)
    outcomes: dict[str, list[tuple[float, bool]]] = {"copied": [], "new": []}
    for _ in range(60):
        phrase = random.integers(0, 1000, 12).tolist()
        request = engine.add_request(phrase + phrase[:4])
        for index in range(4, 12):
            copied = index < 8
            target = phrase[index] if copied else int(random.integers(1000, 2000))
            says = int(random.integers(2000, 3000)) if copied else target
            draft = engine.propose(request, limit=1, offers=Offers("eagle", [says]))
            if len(draft):
                hit = draft.tolist()[0] == target
                outcomes["copied" if copied else "new"].append((draft.probabilities[0], hit))
            engine.observe(request, [target])
        engine.cancel(request)
    right = [hit for _, hit in outcomes["copied"][-40:]]
    assert np.mean(right) > 0.9
    # The offer's token is trusted where nothing matches any more.
    assert np.mean([hit for _, hit in outcomes["new"][-40:]]) > 0.5


def test_a_batch_takes_offers_for_some_rows_and_kinds() -> None:
    engine = Engine(DraftConfig(token_cost=0.0))
    requests = [engine.add_request([token]) for token in (1, 2, 3)]
    first = Offers.of_rows("first", [[5], [], [6, 7]], confidences=[[0.9], [], [0.9, 0.9]])
    second = Offers.of_rows("second", [[], [8], [6, 9]], parents=[[], [-1], [-1, 0]])
    drafts = engine.propose_batch(requests, offers=[first, second])
    assert [row[0] for row in drafts.tolist()] == [5, 8, 6]
    assert drafts.sources.tolist()[:2] == [Source.OFFER, Source.OFFER + 1]
    assert engine.offer_kinds == ("first", "second")
    assert engine.num_refused_offers == 0


def test_no_offer_changes_nothing() -> None:
    engines = [Engine(), Engine()]
    drafts: list[list[list[list[int]]]] = [[], []]
    for engine, own, offers in zip(
        engines, drafts, (Offers.of_rows("eagle", [[]]), None), strict=True
    ):
        requests = [engine.add_request([1, 2, 3, 4, 1, 2, 3, 4, 1, 2])]
        for token in (3, 4, 1):
            own.append(engine.propose_batch(requests, offers=offers).tolist())
            engine.observe_batch(requests, [token], [0, 1])
    assert drafts[0] == drafts[1] and all(row for [row] in drafts[0])
    first, second = (engine.calibration() for engine in engines)
    assert (first.weights, first.reliability) == (second.weights, second.reliability)


def test_time_spent_on_offers_counts() -> None:
    """A step with a dear offer is a slow one, so a token has to promise less afterwards."""
    lengths = []
    for time in (0.0, 3.0):
        engine = Engine(DraftConfig(token_cost=0.1, lookahead=16))
        request = engine.add_request([1, 2, 3])
        for token in range(100, 160):
            engine.propose(request, offers=Offers("eagle", [4], time=time))
            engine.observe(request, [token])
        offer = Offers("other", [5] * 16, confidences=[0.7] * 16)
        lengths.append(len(engine.propose(request, offers=offer)))
    assert lengths[0] < lengths[1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [3, 100]}, "token ids must be from 0 to below 100, got 100 at index 1"),
    ({"token_ids": [-1]}, "token ids must be from 0 to below 100, got -1 at index 0"),
    ({"token_ids": [3, 4], "parents": [-1, 1]}, "got 1 at index 1"),
    ({"token_ids": [3], "parents": [-2]}, "got -2 at index 0"),
    ({"token_ids": [3], "confidences": [float("nan")]}, "confidences must be from 0 to 1, got nan"),
    ({"token_ids": [3], "confidences": [1.5]}, "confidences must be from 0 to 1, got 1.5"),
    ({"token_ids": [3] * 1025}, "at most 1024 tokens, got 1025"),
    (
        {"token_ids": [3, 4], "parents": [-1, -1], "drawn": True},
        "drawn tokens must be a chain, got the parent -1 at index 1",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_offer_is_refused_or_left_out_of_a_batch(
    fields: dict[str, Any], message: str
) -> None:
    engine = Engine(DraftConfig(vocabulary=100, token_cost=0.0))
    good, bad = engine.add_request([1]), engine.add_request([2, 3, 2])
    with pytest.raises(InvalidValueError, match='the offer "eagle"') as raised:
        engine.propose(bad, offers=Offers("eagle", **fields))
    assert message in str(raised.value)
    plain = engine.propose(bad).tolist()
    size = len(fields["token_ids"])
    batch = {
        "token_ids": [7, *fields["token_ids"]],
        "offsets": [0, 1, 1 + size],
        "parents": [-1, *fields.get("parents", range(-1, size - 1))],
        "confidences": [0.9, *fields.get("confidences", [0.9] * size)],
        "drawn": fields.get("drawn", False),
    }
    drafts = engine.propose_batch([good, bad], offers=Offers("eagle", **batch))
    assert drafts.tolist() == [[7], plain]
    assert engine.num_refused_offers == 1


@pytest.mark.parametrize(
    ("offers", "message"),
    [
        (lambda: Offers("eagle", [1], [0, 1]), "one more entry than the 2 requests"),
        (lambda: Offers("eagle", [1], [0, 1, 2]), "number of their token_ids, 1"),
        (lambda: Offers("eagle", [1], [0, 3, 1]), "offsets must rise, got 3"),
        (lambda: Offers("eagle", [1, 2], [0, 1, 2], [-1]), "each of 2 token_ids, got 1"),
        (lambda: Offers("eagle", [1], [0, 1, 1], confidences=[]), "got 0"),
        (lambda: Offers("eagle", [1], [0, 1, 1], time=-1.0), "at least 0, got -1"),
        (lambda: Offers("eagle", [1], [0, 1, 1], time=float("nan")), "got nan"),
        (lambda: Offers("", [1], [0, 1, 1]), "1 to 64 bytes, got 0"),
        (lambda: Offers("e" * 65, [1], [0, 1, 1]), "1 to 64 bytes, got 65"),
        (lambda: [Offers("a", [], [0, 0, 0])] * 2, 'got two of "a"'),
        (lambda: [Offers(str(i), [], [0, 0, 0]) for i in range(5)], "got 5"),
    ],
)
def test_offers_that_are_wrong_as_a_whole_are_refused(
    offers: Callable[[], Any], message: str
) -> None:
    engine = Engine()
    requests = [engine.add_request([1]), engine.add_request([2])]
    with pytest.raises(InvalidValueError, match=message):
        engine.propose_batch(requests, offers=offers())


@pytest.mark.parametrize("offers", [[7], 7])
def test_what_is_no_offer_is_named(offers: Any) -> None:
    engine = Engine()
    with pytest.raises(TypeError, match="offers must be Offers or a list of them, got 7"):
        engine.propose_batch([engine.add_request([1])], offers=offers)


def test_offers_show_what_they_were_made_of() -> None:
    offers = Offers("eagle", [5, 6, 7], [0, 1, 3], [-1, -1, 0], [0.5, 0.25, 1], 2.0, True)
    assert (offers.kind, offers.time, offers.drawn) == ("eagle", 2.0, True)
    columns: list[Any] = [offers.token_ids, offers.offsets, offers.parents, offers.confidences]
    assert [None if each is None else each.tolist() for each in columns] == [
        [5, 6, 7],
        [0, 1, 3],
        [-1, -1, 0],
        [0.5, 0.25, 1.0],
    ]
    assert repr(offers) == "<Offers of 'eagle', 2 rows: [5, 6, 7]>"
    parents, confidences = [[-1], [-1, 0]], [[0.5], [0.25, 1]]
    rows = Offers.of_rows("eagle", [[5], [6, 7]], parents=parents, confidences=confidences)
    assert rows.offsets.tolist() == [0, 1, 3]
    assert rows.parents is not None and rows.parents.tolist() == [-1, -1, 0]
    plain = Offers("eagle", [5])
    assert plain.offsets.tolist() == [0, 1]
    assert plain.parents is None and plain.confidences is None
    with pytest.raises(ValueError, match="read-only"):
        offers.token_ids[0] = 1


def test_an_engine_takes_sixteen_kinds() -> None:
    engine = Engine()
    request = engine.add_request([1])
    for number in range(16):
        engine.propose(request, offers=Offers(f"kind {number}", [2]))
    with pytest.raises(InvalidValueError, match='at most 16 kinds, got one more, "kind 16"'):
        engine.propose(request, offers=Offers("kind 16", [2]))


def test_other_drafters_take_none() -> None:
    engine = Engine(DraftConfig.prompt_lookup())
    request = engine.add_request([1])
    with pytest.raises(InvalidValueError, match="only the default drafter takes them"):
        engine.propose(request, offers=Offers("eagle", [2]))


def test_a_request_that_is_gone_gets_nothing() -> None:
    engine = Engine(DraftConfig(token_cost=0.0))
    request, gone = engine.add_request([1]), engine.add_request([2])
    engine.cancel(gone)
    offers = Offers.of_rows("eagle", [[5], [6]])
    assert engine.propose_batch([request, gone], offers=offers).tolist() == [[5], []]
    assert engine.wants("eagle", [gone], time=0.0).tolist() == [False]


def test_what_does_not_pay_is_tried_after_ever_longer_pauses() -> None:
    back_off = _core.BackOff(2, 8)
    asked = [step for step in range(1, 40) if back_off.asks(False)]
    assert asked == [2, 6, 14, 22, 30, 38]
    assert back_off.asks(True)
    assert [back_off.asks(False) for _ in range(3)] == [False, True, False]


def asks(*, right: float, time: float, steps: int = 400) -> float:
    """How often an engine asks a drafter in the last quarter of the steps, on new text."""
    engine = Engine(DraftConfig(token_cost=0.01))
    random = np.random.default_rng(3)
    request = engine.add_request([1, 2, 3])
    asked = []
    for _ in range(steps):
        target = random.integers(0, 10_000, 5).tolist()
        wanted = engine.wants("eagle", [request], time=time)
        assert wanted.dtype == bool
        asked.append(bool(wanted[0]))
        offers = None
        if asked[-1]:
            hits = np.logical_and.accumulate(random.random(4) < right)
            says = [t if hit else 0 for t, hit in zip(target, hits, strict=False)]
            offers = Offers.of_rows("eagle", [says], time=time)
        draft = engine.propose_batch([request], offers=offers).tolist()[0]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == target[accepted]:
            accepted += 1
        engine.observe(request, target[: accepted + 1])
    return float(np.mean(asked[-steps // 4 :]))


def test_a_drafter_is_asked_where_it_pays() -> None:
    assert asks(right=0.8, time=0.2) > 0.9
    assert asks(right=0.1, time=0.5) < 0.1
    assert asks(right=0.8, time=5.0) < 0.1


def test_what_a_drafter_expects_and_the_time_that_it_takes_are_corrected() -> None:
    """It is asked in the steps of which it says that they pay, though it promises too much, and
    though its drafts take a quarter of the time that they are said to take."""
    engine = Engine(DraftConfig(token_cost=0.01))
    request = engine.add_request([1, 2, 3])
    random = np.random.default_rng(3)
    asked: dict[bool, list[bool]] = {True: [], False: []}
    for step in range(600):
        easy = bool(random.random() < 0.5)
        target = random.integers(0, 10_000, 5).tolist()
        [wanted] = engine.wants("small", [request], time=4.0, expected=[6.0 if easy else 2.0])
        if step >= 300:
            asked[easy].append(bool(wanted))
        says = target[:4] if easy else [0] * 4
        offers = Offers("small", says, [0, 4], time=1.0, drawn=True) if wanted else None
        draft = engine.propose_batch([request], offers=offers).tolist()[0]
        engine.observe(request, target if easy and len(draft) == 4 else target[:1])
    assert np.mean(asked[True]) > 0.9
    assert np.mean(asked[False]) < 0.2


def test_one_bad_draft_does_not_silence_a_drafter() -> None:
    """One step says little; several that fail say that it does not pay here."""
    engine = Engine(DraftConfig(token_cost=0.06))
    request = engine.add_request([1, 2, 3])
    asked = []
    for step in range(10):
        [wanted] = engine.wants("small", [request], time=1.6, expected=[4.5])
        asked.append(bool(wanted))
        first = 100 * (step + 1)
        offers = None
        if wanted:
            says = list(range(first, first + 6))
            offers = Offers("small", says, confidences=[0.9] * 6, time=1.6)
        engine.propose_batch([request], offers=offers)
        engine.observe(request, [first, 99] if wanted else [first])
    assert asked[:2] == [True, True]
    assert asked[5:] == [False] * 5


def test_tokens_that_would_not_have_paid_are_not_the_engines() -> None:
    """With an offer the engine's tokens are drafted too; alone they would not have been."""
    engine = Engine()
    text = [10, 11, 12, 13, 14]
    options: Any = {
        "cost": [1.0, *[2.0] * 16],
        "limits": [4],
    }  # the first token is dear, others free
    for _ in range(3):
        request = engine.add_request([*text, 2, 10])
        engine.wants("small", [request], expected=[4.0], **options)
        assert engine.propose_batch([request], **options).tolist() == [[]]
        offers = Offers("small", text[1:], confidences=[0.9] * 4)
        [draft] = engine.propose_batch([request], offers=offers, **options).tolist()
        assert draft == text[1:]
        engine.observe(request, [*draft, 3])
        assert not np.any(engine.calibration().plain_steps[1::4])
        engine.cancel(request)


def test_what_is_not_known_of_a_drafter_gives_no_hope_for_the_engines_draft() -> None:
    """Long drafts that promise ten tokens have brought two: a drafter that is new and expects one
    will not change that."""
    steps = [0.0] * 36 + [200.0, 2.0, 10.0, 0.0]  # those that promise more than ten, in the end
    calibration = dataclasses.replace(Engine().calibration(), plain_steps=tuple(steps))
    text = list(range(10, 40))
    engine = Engine(calibration=calibration)
    request = engine.add_request([*text, *text, *text[:8]])
    assert engine.propose_batch([request]).probabilities.sum() > 10
    assert engine.wants("small", [request], time=0.2, expected=[1.0]).tolist() == [False]
    assert engine.wants("small", [request], time=0.2, expected=[6.0]).tolist() == [True]


@pytest.mark.parametrize("tree_budget", [None, 8])
def test_asking_changes_no_draft(tree_budget: int | None) -> None:
    """A draft found by `wants` serves the next call for the same, and that call alone."""
    random = np.random.default_rng(7)
    asked, plain = (Engine(DraftConfig(lookahead=6, tree_budget=tree_budget)) for _ in range(2))
    pairs = [(asked.add_request([1, 2]), plain.add_request([1, 2])) for _ in range(3)]
    first, second = map(list, zip(*pairs, strict=True))
    for _ in range(200):
        token_cost = float(random.choice([0.0, 0.05]))
        limits = random.integers(0, 7, 3).tolist()
        asked.wants("eagle", first, token_cost=float(random.choice([0.0, 0.05])), limits=limits)
        again = random.integers(0, 7, 3).tolist() if random.random() < 0.3 else limits
        if random.random() < 0.2:
            asked.propose(first[0], token_cost=0.0)
        drafts, expected = (
            engine.propose_batch(requests, token_cost=token_cost, limits=again)
            for engine, requests in ((asked, first), (plain, second))
        )
        assert drafts.tolist() == expected.tolist()
        assert drafts.probabilities.tolist() == expected.probabilities.tolist()
        rows = [random.integers(0, 3, random.integers(1, 4)).tolist() for _ in range(3)]
        offsets = np.cumsum([0, *map(len, rows)])
        for engine, requests in ((asked, first), (plain, second)):
            engine.observe_batch(requests, list(chain(*rows)), offsets)
    assert asked.calibration().weights == plain.calibration().weights


def test_wants_refuses_wrong_values() -> None:
    engine = Engine()
    request = engine.add_request([1])
    with pytest.raises(InvalidValueError, match="at least 0, got -1"):
        engine.wants("eagle", [request], time=-1.0)
    with pytest.raises(InvalidValueError, match="limits must be 0 or greater, got -3"):
        engine.wants("eagle", [request], limits=[-3])
    for wrong in (-1.0, 1025.0, float("nan")):
        with pytest.raises(InvalidValueError, match="expected must be from 0 to 1024 tokens"):
            engine.wants("eagle", [request], expected=[wrong])
    with pytest.raises(InvalidValueError, match="expected must have one entry for each of the 1"):
        engine.wants("eagle", [request], expected=[1.0, 1.0])
    assert engine.wants("eagle", [request], limits=[0]).tolist() == [False]
    assert engine.wants("eagle", []).tolist() == []
