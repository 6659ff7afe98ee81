"""Which server a request goes to."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft.errors import InvalidValueError
from fastdraft.serving.routing import choose_server

LOADS = st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1, max_size=9)
PROMPTS = st.lists(st.integers(0, 1000), max_size=9)


@given(PROMPTS, LOADS, st.floats(1, 4))
def test_nobody_is_sent_to_a_full_server(
    prompt: list[int], loads: dict[str, int], spread: float
) -> None:
    server = choose_server(prompt, loads, spread=spread)
    assert loads[server] * len(loads) < spread * (sum(loads.values()) + 1)
    # The next in the prompt's order does not depend on the others' loads.
    order = []
    left = dict.fromkeys(loads, 0)
    while left:
        order.append(choose_server(prompt, left))
        del left[order[-1]]
    room = [s for s in order if loads[s] * len(loads) < spread * (sum(loads.values()) + 1)]
    assert server == room[0]


def test_prompts_spread_evenly_and_stay_where_they_are_when_one_leaves() -> None:
    names = [f"10.0.0.{at}:8000" for at in range(8)]
    prompts = np.random.default_rng(1).integers(0, 1000, (4000, 20))
    before = [choose_server(prompt, dict.fromkeys(names, 0)) for prompt in prompts]
    assert all(400 < count < 600 for count in Counter(before).values())
    after = [choose_server(prompt, dict.fromkeys(names[1:], 0)) for prompt in prompts]
    assert all(old in (new, names[0]) for old, new in zip(before, after, strict=True))


def test_the_order_is_the_same_in_every_process() -> None:
    """It depends on a prompt and on names alone, not on the type of the prompt's integers."""
    loads = dict.fromkeys("abcdef", 0)
    for kind in (np.int32, np.int64):
        prompts = np.array([[at, 2 * at] for at in range(12)], kind)
        for each in (prompts, prompts.tolist()):
            assert "".join(choose_server(prompt, loads) for prompt in each) == "dabffffdfaaf"


def test_a_bad_spread_and_no_servers_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"spread must be at least 1, got 0\.9"):
        choose_server([1], {"a": 0}, spread=0.9)
    with pytest.raises(InvalidValueError, match="got nan"):
        choose_server([1], {"a": 0}, spread=float("nan"))
    with pytest.raises(InvalidValueError, match="must have a server, got none"):
        choose_server([1], {})
