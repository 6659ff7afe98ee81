"""Block verification of one draft with plain numbers."""

from __future__ import annotations

from collections.abc import Sequence


def keep_chances(
    p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], draft: Sequence[int]
) -> tuple[list[float], list[float], list[list[float]]]:
    """How a draft is verified.

    p: the target's distribution after each number of draft tokens; q: those that the tokens were
    drawn from; draft: the tokens. Gives for each number of tokens, from 0: the chance that at least
    these are kept, which is what is made true; the chance that the number is kept where no larger
    one is; and the weights of the token that is recovered after it, after the whole draft p.
    """
    at_least = [1.0]
    for j, token in enumerate(draft):
        at_least.append(min(1.0, at_least[-1] * p[j][token] / q[j][token]))
    nothing = [0.0] * len(p[0])
    chances, residuals = [], []
    for k, own, drawn in zip(at_least, p, [*q[: len(draft)], nothing], strict=False):
        pairs = zip(own, drawn, strict=True)
        residual = [a - b / k if k and a > b / k else 0.0 for a, b in pairs]
        left = sum(residual)
        chances.append(1.0 if k == 1 else left / (left + 1 / k - 1) if left else 0.0)
        residuals.append(residual)
    return at_least, chances, residuals
