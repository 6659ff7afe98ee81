"""Where steps are stairs, what is learned of them is worth almost what an oracle's knowledge is."""

from __future__ import annotations

import pytest

import stairs

SIZES = [(1, 0), (8, 0), (20, 0), (200, 0), (1, 100), (20, 100), (200, 100)]


# Between even costs of a piece and very uneven ones, few sizes.
@pytest.mark.parametrize(
    ("rows", "prompts", "pieces"),
    [
        *((*size, pieces) for size in SIZES for pieces in (1.0, 1.3)),
        *((*size, 1.12) for size in ((8, 0), (20, 100))),
    ],
)
def test_within_two_percent_of_the_oracle(rows: int, prompts: int, pieces: float) -> None:
    def speed(choice: str) -> float:
        host = stairs.Stairs(7.1e-3, 0.021e-3, pieces, 0.03, seed=1)
        return stairs.serve(choice, host, rows, steps=1200, prompts=prompts)

    assert speed("learned") >= 0.98 * speed("oracle")


def test_a_host_that_hides_its_stairs_is_served_worse() -> None:
    """What the sizes are worth: without them free places stay empty."""

    def speed(choice: str) -> float:
        host = stairs.Stairs(7.1e-3, 0.021e-3, 1.12, 0.03, seed=1)
        return stairs.serve(choice, host, 8, steps=1200)

    assert speed("learned") > 1.03 * speed("smooth")


def test_a_step_is_padded_to_a_captured_size() -> None:
    host = stairs.Stairs(7e-3, 1e-3, 2.0, 0.0, seed=0)
    assert host.seconds(9, even=True) == host.seconds(16, even=True) == pytest.approx(23e-3)
    assert host.seconds(9, even=False) == pytest.approx(46e-3)
    # No graph is as large.
    assert host.seconds(600, even=True) == host.seconds(600, even=False)
