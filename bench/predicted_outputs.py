"""Predicted outputs: the hosted service's algorithm and the default drafter, side by side.

The experiments of the report that reverse-engineered the service, over real text in place of the
alphabet (the standard library's sources; see bench/corpus.py), and further ones in their manner.
The target writes an output that is known, so a draft is accepted up to its first mismatch and the
counts are exact:

- bifurcation: the prediction is right up to a position and then goes on as another text;
- insertion: the target inserts so many tokens that the prediction lacks, at several positions;
- edits: so many insertions, deletions and replacements in a thousand tokens, 1 to 8 tokens each;
- blocks: the output has the prediction's blocks, of so many tokens, in another order;
- families: recorded requests that come with a reference, handed over as the prediction (`--data`).

    python bench/predicted_outputs.py --json bench/results/predicted_outputs.json --plot FILE.png

Predictions are drafted 16 tokens a step by both. The default drafter weighs its tokens at a cost of
0.02 steps each; modelled speed = emitted / (steps + 0.02 * drafted). Except for the families the
prompt is empty, and every output starts with an engine that has learnt nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
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
INSERTED = (1, 2, 4, 8, 16, 32, 64)
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


def compare(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], **where: Any) -> Row:
    """Both drafters over pairs of a prediction and an output, their counts added up."""
    pairs = list(pairs)
    row: Row = dict(where)
    for name, config in CONFIGS.items():
        counts = (decode(Engine(config), [], *pair) for pair in pairs)
        row[name] = summary(sum(counts, DraftStats()), outputs=len(pairs))
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


def experiments(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Row:
    """All experiments on generated predictions."""
    rng = random.Random(0)
    return {
        "bifurcation": [
            compare(
                (
                    ((*text[:position], *other[position:]), text)
                    for text, other in zip(texts, others, strict=True)
                ),
                position=position,
            )
            for position in range(0, LENGTH + 1, 64)
        ],
        "insertion": [
            compare(
                (
                    ((*text[:position], *text[position + number :]), text)
                    for position in range(0, LENGTH - max(INSERTED) + 1, 32)
                    for text in texts
                ),
                inserted=number,
            )
            for number in INSERTED
        ],
        "edits": [
            compare(
                (
                    (text, edited(text, round(number * LENGTH / 1000), rng))
                    for text in texts
                    for _ in range(4)
                ),
                edits_per_thousand=number,
            )
            for number in EDITS
        ],
        "blocks": [
            compare(
                ((text, shuffled(text, size, rng)) for text in texts for _ in range(4)),
                tokens=size,
            )
            for size in BLOCKS
        ],
    }


def families(folder: Path) -> list[Row]:
    """Both drafters over the recorded requests that have a reference."""
    rows: list[Row] = []
    for name, records in harness.recorded_families(folder, references=True).items():
        referring = [
            (each, each.reference_ids) for each in records if each.reference_ids is not None
        ]
        if not referring:
            continue
        row: Row = {"family": name, "requests": len(referring)}
        for drafter, config in CONFIGS.items():
            engine, total = Engine(config), DraftStats()
            for record, expected in referring:
                total += decode(engine, record.prompt_ids, expected, record.output_ids.tolist())
            row[drafter] = summary(total, outputs=len(referring))
        rows.append(row)
    return rows


def report(results: Row) -> None:
    for kind, (title, key) in {
        "bifurcation": ("bifurcation after token", "position"),
        "insertion": ("insertion of so many tokens", "inserted"),
        "edits": ("edits in a thousand tokens", "edits_per_thousand"),
        "blocks": ("blocks in another order, tokens", "tokens"),
        "families": ("recorded requests, reference as prediction", "family"),
    }.items():
        fields = {
            "accepted": "accepted",
            "rejected": "rejected",
            "tokens_per_step": "tokens a step",
            "speed": "modelled speed",
        }
        harness.show(
            title,
            {
                "": key,
                **{
                    f"{heading}\n{name}": (name, field)
                    for field, heading in fields.items()
                    for name in CONFIGS
                },
            },
            results[kind],
        )


def plot(results: Row, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    colours = {"service": "tab:orange", "default": "tab:blue"}

    def curve(axis: Any, rows: Sequence[Row], key: str, field: str, **style: Any) -> None:
        for name, colour in colours.items():
            axis.plot(
                [row[key] for row in rows],
                [row[name][field] for row in rows],
                color=colour,
                label=f"{name}: {field.replace('tokens_per_step', 'tokens a step')}",
                **style,
            )

    axis = axes[0, 0]
    curve(axis, results["bifurcation"], "position", "accepted", marker="o")
    curve(axis, results["bifurcation"], "position", "rejected", marker="o", linestyle=":")
    axis.set(title="Bifurcation", xlabel="tokens that are right", ylabel="prediction tokens")
    axis.set_yscale("symlog", linthresh=16)
    axis = axes[0, 1]
    curve(axis, results["insertion"], "inserted", "accepted", marker="o")
    curve(axis, results["insertion"], "inserted", "rejected", marker="o", linestyle=":")
    axis.set(title="Insertion", xlabel="tokens that the prediction lacks")
    axis.set_xscale("log", base=2)
    axis = axes[1, 0]
    curve(axis, results["edits"], "edits_per_thousand", "tokens_per_step", marker="o")
    axis.set(title="Edits", xlabel="edits in a thousand tokens", ylabel="tokens a step")
    axis = axes[1, 1]
    curve(axis, results["blocks"], "tokens", "tokens_per_step", marker="o")
    axis.set(title="Blocks in another order", xlabel="tokens of a block")
    axis.set_xscale("log", base=2)
    for axis in axes.flat:
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="cuts the text; by default into words"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="recorded requests, *.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as PNG, SVG or PDF")
    options = parser.parse_args()

    about = harness.about()
    tokens = corpus.tokens(2 * TEXTS * LENGTH * 8, options.tokenizer).reshape(2 * TEXTS, -1)
    texts = [tuple(row[:LENGTH].tolist()) for row in tokens]
    results = experiments(texts[:TEXTS], texts[TEXTS:])
    results["families"] = [] if options.data is None else families(options.data)
    report(results)
    harness.finish(options, {**about, **results})
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
