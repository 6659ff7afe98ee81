"""Cases drawn by seeds: the first few in the suite, any in `make campaign`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

__all__ = ["cases"]


def cases(number: int) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a function of a `seed`: of the first `number` ones, and of random ones under
    the profile "campaign". A failure names its seed; one that found a fault stays as an `example`.
    """
    is_campaign = settings.get_current_profile_name() == "campaign"
    # Nearby seeds have nothing in common, so none is smaller than another.
    phases = [Phase.explicit, *([Phase.generate] if is_campaign else [])]

    def decorated(case: Callable[..., None]) -> Any:
        test = settings(phases=phases, max_examples=20)(given(seed=st.integers(0, 2**40))(case))
        for seed in range(number):
            test = example(seed=seed)(test)
        return test

    return decorated
