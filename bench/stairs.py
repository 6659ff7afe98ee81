"""Choosing drafts where steps are stairs: what is learned of them, against an oracle that knows.

A host pads each forward to the next size of which it has captured a graph, and runs steps whose
rows all have the longest draft in graphs of their own, which are faster. So tokens up to the next
size are free. A step of this modelled host takes `--base-ms`, and `--token-ms` for each padded
token; without a graph of its own `--pieces` times as much; and it varies by `--noise`.

Each row of a step has a draft whose tokens are right with some chance each, which changes from step
to step and is known. What is chosen are the tokens to verify, by the engine's rule: those that make
tokens emitted - rate * time greatest, for the rate of late. Compared are

- learned: the times as `StepTimes` learns them from these steps, knowing the captured sizes;
- smooth: the same without the sizes, and without the graphs of even steps;
- oracle: the true times;
- none, longest: no drafts, and the longest draft in each row.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence

import numpy as np

from fastdraft.serving.vllm.step_times import StepTimes
from harness import Row, about, add_server, finish, parser, show

LOOKAHEAD = 8
PREMIUM = 1.2
# Those that vLLM captures by default.
SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
CHOICES = ("learned", "smooth", "oracle", "none", "longest")


class Stairs:
    """The modelled host; times in the unit of `base` and `token`."""

    def __init__(self, base: float, token: float, pieces: float, noise: float, seed: int) -> None:
        self.base, self.token, self.pieces, self.noise = base, token, pieces, noise
        self.random = np.random.default_rng(seed)

    def seconds(self, tokens: int, *, even: bool) -> float:
        """The mean time of a step."""
        place = bisect.bisect_left(SIZES, tokens)
        padded = SIZES[place] if place < len(SIZES) else tokens
        one_graph = even and tokens <= SIZES[-1]
        return (self.base + self.token * padded) * (1.0 if one_graph else self.pieces)

    def run(self, tokens: int, *, even: bool) -> float:
        noise = np.exp(self.noise * self.random.standard_normal())
        return self.seconds(tokens, even=even) * float(noise)


def drafts(random: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The chances of each row's draft tokens, with all before them; and how many are right."""
    quality = random.beta(0.7, 0.7, (rows, 1))
    chances = quality ** np.arange(1, LOOKAHEAD + 1)
    right = (random.random((rows, LOOKAHEAD)) < quality).cumprod(1).sum(1)
    return chances, right


def keep(chances: np.ndarray, seconds: np.ndarray, rate: float) -> np.ndarray:
    """How many tokens of each row pay; `seconds` by all tokens of the step. The engine's rule."""
    rows = len(chances)
    order = np.argsort(-chances, axis=None, kind="stable")
    gain = np.concatenate([[0.0], np.cumsum(chances.ravel()[order])])
    value = gain - PREMIUM * rate * seconds[rows - 1 : rows + chances.size]
    count = len(value) - 1 - int(np.argmax(value[::-1]))  # of equals the most tokens
    kept: np.ndarray = np.bincount(order[:count] // LOOKAHEAD, minlength=rows)
    return kept


def serve(
    choice: str, host: Stairs, rows: int, *, steps: int, prompts: int = 0, seed: int = 0
) -> float:
    """Tokens a second of `steps` steps, each with so many tokens of prompts in it."""
    random = np.random.default_rng(seed)
    times = StepTimes("cuda", SIZES, even_graphs=True)
    if choice == "smooth":
        times = StepTimes("cuda")
    widest = rows * (1 + LOOKAHEAD)
    own = [host.seconds(tokens + prompts, even=False) for tokens in range(1, widest + 1)]
    true, even_time = np.array(own), host.seconds(widest, even=True)
    emitted, elapsed = 0.0, 0.0
    recent = np.array([8.0 * rows, 8.0 * host.seconds(rows, even=False)])
    for _ in range(steps):
        chances, right = drafts(random, rows)
        rate = recent[0] / recent[1]
        kept, even = np.zeros(rows, np.int64), False
        if choice == "longest":
            even = True
        elif choice == "oracle":
            best = true if prompts else np.minimum(true, even_time)
            kept = keep(chances, best, rate)
            even = not prompts and even_time < true[rows + kept.sum() - 1]
        elif choice != "none":
            cost = times.curve(rows, rows, LOOKAHEAD, even=True)
            if cost is not None:
                kept = keep(chances, cost, rate)
                even = times.is_better_even(int(rows + kept.sum()))
        if even:
            kept = np.full(rows, LOOKAHEAD)
        tokens = int(rows + kept.sum())
        seconds = host.run(tokens + prompts, even=tokens == widest and not prompts)
        decoded: dict[Hashable, int] = {row: 1 + int(kept[row]) for row in range(rows)}
        times.add_forward({**decoded, "prompt": prompts} if prompts else decoded)
        times.observe(decoded, rows, seconds, 1 + LOOKAHEAD)
        step = float((1 + np.minimum(kept, right)).sum())
        emitted, elapsed = emitted + step, elapsed + seconds
        recent = 0.98 * recent + [step, seconds]
    return emitted / elapsed


def measure(
    at_once: Sequence[int], host: tuple[float, float, float, float], steps: int
) -> list[Row]:
    found: list[Row] = []
    for prompts in (0, 100):
        for rows in at_once:
            row: Row = {"at_once": rows, "prompt_tokens": prompts}
            for choice in CHOICES:
                row[choice] = serve(
                    choice, Stairs(*host, seed=1), rows, steps=steps, prompts=prompts
                )
            row["of_oracle"] = row["learned"] / row["oracle"]
            row["smooth_of_oracle"] = row["smooth"] / row["oracle"]
            found.append(row)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--at-once", type=int, nargs="+", default=[1, 3, 8, 20, 64, 200])
    made.add_argument("--steps", type=int, default=1500)
    add_server(made)
    made.add_argument("--pieces", type=float, default=1.12)
    made.add_argument("--noise", type=float, default=0.03)
    options = made.parse_args()
    results = about(**{k: v for k, v in vars(options).items() if k != "json"})
    host = (options.base_ms / 1e3, options.token_ms / 1e3, options.pieces, options.noise)
    rows = measure(options.at_once, host, options.steps)
    columns = {name: name for name in ("at_once", "prompt_tokens", *CHOICES)}
    columns |= {"of oracle": "of_oracle", "smooth": "smooth_of_oracle"}
    show("Tokens a second", columns, rows, digits=3)
    finish(options, {**results, "rows": rows})


if __name__ == "__main__":
    main()
