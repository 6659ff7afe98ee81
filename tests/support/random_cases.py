"""Cases drawn by seeds: the first few in the suite, any in `make campaign`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hypothesis import Phase, assume, event, example, given, settings
from hypothesis import strategies as st

__all__ = ["cases", "leave_out"]

IS_CAMPAIGN = settings.get_current_profile_name() == "campaign"  # the profile of `make campaign`


def cases(number: int, first: int = 0) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a function of a `seed`: of `number` ones from `first` on, and of random ones
    under the profile "campaign". A failure names its seed; one that found a fault stays as an
    `example`.
    """
    # Nearby seeds have nothing in common, so none is smaller than another.
    phases = [Phase.explicit, *([Phase.generate] if IS_CAMPAIGN else [])]

    def decorated(case: Callable[..., None]) -> Any:
        test = settings(phases=phases, max_examples=20)(given(seed=st.integers(0, 2**40))(case))
        for seed in range(first, first + number):
            test = example(seed=seed)(test)
        return test

    return decorated


def leave_out(why: str) -> NoReturn:
    """Ends a random case that compares nothing. Those of the suite must all compare something."""
    assert IS_CAMPAIGN, why
    event(why)
    assume(False)
    raise AssertionError
