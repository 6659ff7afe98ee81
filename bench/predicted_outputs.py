"""Predicted outputs: the hosted service's algorithm and the default drafter, side by side.

The experiments of the report that reverse-engineered the service, over real text in place of the
alphabet (the standard library's sources; see bench/corpus.py), and further ones in their manner.
The target writes an output that is known, so a draft is accepted up to its first mismatch and the
counts are exact:

- edits: so many insertions, deletions and replacements in a thousand tokens, 1 to 8 tokens each;
- blocks: the output has the prediction's blocks, of so many tokens, in another order;
- families: recorded requests that come with a reference, handed over as the prediction (`--data`).

    python bench/predicted_outputs.py --json bench/results/predicted_outputs.json

Predictions are drafted 16 tokens a step by both. The default drafter weighs its tokens at a cost of
0.02 steps each; modelled speed = emitted / (steps + 0.02 * drafted). Except for the families the
prompt is empty, and every output starts with an engine that has learnt nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

import corpus
import harness
from fastdraft import DraftConfig, DraftStats, Engine
from fastdraft.replay.trace import accepted_prefix
from harness import Row

LENGTH = 512  # tokens of a text
TEXTS = 8
TOKEN_COST = 0.02
CONFIGS = {
    "service": DraftConfig.predicted_outputs(),
    "default": DraftConfig(token_cost=TOKEN_COST),
}
EDITS = (0, 1, 2, 5, 10, 20, 50, 100)  # in a thousand tokens
BLOCKS = (16, 32, 64, 128, 256)  # tokens


def decode(
    engine: Engine, prompt: ArrayLike, prediction: ArrayLike, output: Sequence[int]
) -> DraftStats:
    """Greedy decoding by a target that writes `output`; prefill emits none of it."""
    request = engine.add_request(prompt, prediction=prediction)
    done = 0
    while done < len(output):
        draft = engine.propose(request).tolist()
        emitted = output[done : done + accepted_prefix(draft, output, done) + 1]
        engine.observe(request, emitted)
        done += len(emitted)
    return engine.finish(request)


def compare(
    requests: Sequence[tuple[ArrayLike, ArrayLike, Sequence[int]]],
    /,
    *,
    learns: bool = False,
    **where: Any,
) -> Row:
    """Both drafters over requests of a prompt, a prediction and an output, their counts added up.
    `learns`: an engine has learnt from the requests before."""
    row: Row = dict(where)
    for name, config in CONFIGS.items():
        engine, total = Engine(config), DraftStats()
        for request in requests:
            total += decode(engine if learns else Engine(config), *request)
        row[name] = summary(total, outputs=len(requests))
    return row


def summary(stats: DraftStats, *, outputs: int) -> Row:
    """What is reported of a drafter; tokens accepted and rejected are those of one output."""
    return {
        "accepted": stats.accepted_prediction_tokens / outputs,
        "rejected": stats.rejected_prediction_tokens / outputs,
        "steps": stats.steps / outputs,
        "tokens_per_step": stats.mean_accepted_tokens,
        "speed": stats.emitted / (stats.steps + TOKEN_COST * stats.drafted),
    }


def edited(text: Sequence[int], edits: int, rng: random.Random) -> list[int]:
    """`text` with so many edits at random places, the new tokens drawn from the text itself."""
    output = list(text)
    for place in sorted(rng.sample(range(len(text)), edits), reverse=True):
        kind, size = rng.choice(("insert", "delete", "replace")), rng.randint(1, 8)
        new = [] if kind == "delete" else rng.choices(text, k=size)
        output[place : place + (0 if kind == "insert" else size)] = new
    return output


def shuffled(text: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """The blocks of `size` tokens in a random order."""
    blocks = [text[begin : begin + size] for begin in range(0, len(text), size)]
    rng.shuffle(blocks)
    return [token for block in blocks for token in block]


def experiments(texts: Sequence[Sequence[int]]) -> Row:
    """The experiments on generated predictions."""
    rng = random.Random(0)

    def of_texts(change: Callable[..., list[int]], number: int) -> list[Any]:
        return [([], text, change(text, number, rng)) for text in texts for _ in range(4)]

    edits = {number: of_texts(edited, round(number * LENGTH / 1000)) for number in EDITS}
    blocks = {size: of_texts(shuffled, size) for size in BLOCKS}
    return {
        "edits": [compare(each, edits_per_thousand=number) for number, each in edits.items()],
        "blocks": [compare(each, tokens=size) for size, each in blocks.items()],
    }


def families(folder: Path) -> list[Row]:
    """Both drafters over the recorded requests that have a reference."""
    rows: list[Row] = []
    for name, records in harness.recorded_families(folder, references=True).items():
        referring = [
            (each.prompt_ids, each.reference_ids, each.output_ids.tolist())
            for each in records
            if each.reference_ids is not None
        ]
        if referring:
            rows.append(compare(referring, learns=True, family=name, requests=len(referring)))
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="recorded requests, *.jsonl")
    options = parser.parse_args()

    about = harness.about()
    tokens = corpus.tokens(TEXTS * LENGTH * 8).reshape(TEXTS, -1)
    texts = [tuple(row[:LENGTH].tolist()) for row in tokens]
    results = experiments(texts)
    results["families"] = [] if options.data is None else families(options.data)
    for kind, rows in results.items():
        shown = [{key: row[key] for key in row if key not in CONFIGS} for row in rows]
        for line, row in zip(shown, rows, strict=True):
            line |= {f"{name}, tokens a step": row[name]["tokens_per_step"] for name in CONFIGS}
        harness.show(kind, None, shown or [{"": "none"}])
    harness.finish(options, {**about, **results})


if __name__ == "__main__":
    main()
