"""Verification with plain numbers: one row, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fastdraft.kernels import operands
from fastdraft.verification import Status

INF, NAN = math.inf, math.nan
ACCEPT, RESIDUAL_TOKEN, RESIDUAL_CHUNK = 2, 3, 4
Row = Sequence[float]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def noise(seed: int, position: int, stream: int, index: int) -> float:
    seed %= 2**64
    counter = (index, position % 2**32, position >> 32, stream)
    high, low, _, _ = philox(counter, (seed % 2**32, seed >> 32))
    uniform = (high * 2**32 + low + 0.5) / 2**64
    return -math.log1p(-min(uniform, 1 - 2**-53))


def has_nan(row: Row) -> bool:
    return any(math.isnan(x) for x in row)


def is_empty(row: Row) -> bool:
    return max(row) == -INF and not has_nan(row)


def argmax(row: Row) -> int:
    for token, logit in enumerate(row):
        if math.isnan(logit):
            return token
    return list(row).index(max(row))


def weights(row: Row, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The weight of each token of a row, by sorting, with the largest weight 1."""
    top = max(row)

    def weight(x: float) -> float:
        return math.exp((x - top) / temperature)

    lowest = sorted(row, reverse=True)[top_k - 1] if 0 < top_k < len(row) else -INF
    kept = [token for token, x in enumerate(row) if x >= lowest]
    if top_p < 1:
        total, above, nucleus = sum(weight(row[token]) for token in kept), 0.0, list[int]()
        for token in sorted(kept, key=lambda token: -row[token]):
            if nucleus and above >= top_p * total:
                break
            nucleus.append(token)
            above += weight(row[token])
        kept = nucleus
    if min_p > 0:
        lowest = top + temperature * math.log(min_p)
        kept = [token for token in kept if row[token] >= lowest]
    left = set(kept)
    return [weight(x) if token in left else 0.0 for token, x in enumerate(row)]


def race(
    weights: Row, seed: int, position: int, chunk_stream: int = 1, token_stream: int = 0
) -> int:
    width = operands.CHUNK
    chunks = [weights[start : start + width] for start in range(0, len(weights), width)]
    ratios = [sum(chunk) / noise(seed, position, chunk_stream, c) for c, chunk in enumerate(chunks)]
    best = ratios.index(max(ratios))
    ratios = [
        weight / noise(seed, position, token_stream, best * width + t)
        for t, weight in enumerate(chunks[best])
    ]
    return best * width + ratios.index(max(ratios))


def draw(
    row: Row,
    seed: int,
    position: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    if temperature == 0 or has_nan(row) or math.isinf(max(row)):
        return argmax(row)
    return race(weights(row, temperature, top_k, top_p, min_p), seed, position)


def walk(
    rows: Sequence[Row],
    choose: Callable[[Row, int], int],
    draft: Sequence[int],
    parents: Sequence[int],
) -> tuple[list[int], list[int], int]:
    """The tokens that a request emits, its path and its status, from the text's last token on.

    choose(row, depth) is the target's token in a row of logits at that depth.
    """
    node, status = -1, 0
    emitted: list[int] = []
    path: list[int] = []
    while True:
        row = rows[node + 1]
        if is_empty(row):
            return emitted, path, status | Status.EMPTY
        status |= Status.NAN * has_nan(row)
        emitted.append(choose(row, len(path)))
        children = [j for j in range(len(draft)) if parents[j] == node and draft[j] == emitted[-1]]
        if not children:
            return emitted, path, status
        (node,) = children
        path.append(node)


def softmax(row: Row) -> list[float]:
    """The distribution of a row of draft logits; NaN throughout where it has none."""
    if has_nan(row) or math.isinf(max(row)):
        return [NAN] * len(row)
    powers = [math.exp(x - max(row)) for x in row]
    return [power / sum(powers) for power in powers]


def keep_probabilities(
    p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], draft: Sequence[int]
) -> tuple[list[float], list[float], list[list[float]]]:
    """How a draft is verified.

    p: the target's distribution after each number of draft tokens; q: those that the tokens were
    drawn from; draft: the tokens. Gives for each number of tokens, from 0: the probability that at
    least these are kept, which is what is made true; the probability that the number is kept where
    no larger one is; and the weights of the token that is recovered after it, after the whole draft
    p.
    """
    at_least = [1.0]
    for j, token in enumerate(draft):
        at_least.append(min(1.0, at_least[-1] * p[j][token] / q[j][token]))
    nothing = [0.0] * len(p[0])
    probabilities, residuals = [], []
    for k, own, drawn in zip(at_least, p, [*q[: len(draft)], nothing], strict=False):
        pairs = zip(own, drawn, strict=True)
        residual = [a - b / k if k and a > b / k else 0.0 for a, b in pairs]
        left = sum(residual)
        probabilities.append(1.0 if k == 1 else left / (left + 1 / k - 1) if left else 0.0)
        residuals.append(residual)
    return at_least, probabilities, residuals


def reject(
    rows: Sequence[Row],
    draft: Sequence[int],
    distributions: Sequence[Row],
    seed: int,
    position: int,
    options: Sequence[float],
) -> tuple[list[int], int]:
    """The tokens that a request emits of a draft that was drawn, and its status."""

    def drawn(j: int) -> bool:
        row, q = rows[j], distributions[j]
        has_softmax = not is_empty(row) and all(x == x and x != INF for x in row)
        return has_softmax and 0 <= draft[j] < len(row) and q[draft[j]] > 0

    temperature, top_k, top_p, min_p = options[0], int(options[1]), options[2], options[3]
    residual = None
    if temperature == 0:
        matches = [not is_empty(rows[j]) and argmax(rows[j]) == draft[j] for j in range(len(draft))]
        last = [*matches, False].index(False)
    else:
        end = [*map(drawn, range(len(draft))), False].index(False)
        of_rows = [weights(row, temperature, top_k, top_p, min_p) for row in rows[:end]]
        p = [[weight / sum(row) for weight in row] for row in of_rows]
        # After the end any distribution does: all of it is left.
        p.append([1.0] + [0.0] * (len(rows[0]) - 1))
        _, probabilities, residuals = keep_probabilities(p, distributions, draft[:end])
        last = max(
            j
            for j, probability in enumerate(probabilities)
            if j == 0
            or (probability > 0 and noise(seed, position, ACCEPT, j) > -math.log(probability))
        )
        if last < end:
            residual = residuals[last] if max(residuals[last]) > 0 else p[last]
    status = Status.NAN * any(map(has_nan, rows[: last + 1]))
    kept = list(draft[:last])
    if is_empty(rows[last]):
        return kept, status | Status.EMPTY
    if residual is None:
        token = draw(rows[last], seed, position + last, temperature, top_k, top_p, min_p)
    else:
        token = race(residual, seed, position + last, RESIDUAL_CHUNK, RESIDUAL_TOKEN)
    return [*kept, token], status


def likeliest(row: Row, heat: float, count: int) -> list[tuple[int, float]]:
    """The most probable tokens of a row, with their probabilities."""
    nothing = [(-1, 0.0)] * count
    if has_nan(row) or max(row) == -INF:
        return nothing
    total = math.fsum(math.exp((x - max(row)) / heat) for x in row)
    order = sorted((t for t, x in enumerate(row) if x > -INF), key=lambda t: -row[t])
    found = [(token, math.exp((row[token] - max(row)) / heat) / total) for token in order[:count]]
    return (found + nothing)[:count]
