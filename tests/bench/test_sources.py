"""What a replay with a source counts, on texts where that is known."""

from __future__ import annotations

import numpy as np
import pytest

from fastdraft.replay import Record
from sources import Decoding, Load, Request, gains, groups_of, next_of, replay

PROMPT = list(range(100, 110))
ANSWER = list(range(200, 260))


def request(prompt, output, *, session=None, reference=None, templates=None, likeliest=None):
    ids = [
        None if each is None else np.array(each, np.int32) for each in (prompt, output, reference)
    ]
    return Request(Record("", *ids, session), templates, likeliest)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
def test_speed_is_the_tokens_over_the_time(tree: bool, at_once: int) -> None:
    """Nothing can be found in a first request of different tokens, and all in the second one."""
    load = Load(tree, at_once, 0.02)
    other = request(PROMPT, ANSWER)
    assert replay([request(range(10), range(50, 90))], "own text", load) == 1.0
    assert replay([other, other], "own text", load) == 1.0
    assert (replay([other, other], "earlier requests", load) > 1.3) == (at_once == 1)
    assert replay([request([*ANSWER, 1], ANSWER)], "own text", load) > 5.0


def test_each_source_gains_where_it_knows_the_answer() -> None:
    ids = np.zeros((len(ANSWER), 8), np.int32)
    ids[:, 0] = ANSWER
    ids[:, 1:] = np.arange(7)
    chances = np.tile(np.array([0.9, *[0.01] * 7], np.float32), (len(ANSWER), 1))
    told = request(PROMPT, ANSWER, reference=ANSWER, templates=ANSWER, likeliest=(ids, chances))
    other = request(range(20), range(300, 360), reference=range(300, 360), templates=[1])
    groups = groups_of([told, other], [told, told, told])
    found = gains(groups, Load(True, 1, 0.003))
    assert found["own text"] == 1.0
    assert "running requests" not in found
    assert found["earlier requests"] == pytest.approx(1.0, abs=0.01)
    for source in ("prediction", "tools", "drafter"):
        assert found[source] > 1.5, source
    # Two further requests read what the first was told, which earlier ones tell as well.
    assert 0.9 < found["logits"] < 1.1


def test_a_session_goes_on_when_its_last_request_has_ended() -> None:
    first, second = request([1, 2], [3, 4], session="a"), request([1, 2, 3], [4], session="a")
    sample, other = request([1, 2], [5, 6], session="a"), request([7], [8])
    waiting = [second, sample, other]
    rows = [Decoding(first, 0, None)]
    # The sample is behind a request that waits.
    assert next_of(waiting, rows) is other
    assert next_of(waiting, rows) is None
    assert next_of([sample, second], rows) is sample
    assert next_of(waiting, []) is second
