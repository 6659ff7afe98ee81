"""Draft models on the demo's requests: every schedule, with lookups beside it, and staged.

The target answers each request greedily, plainly and with each way of drafting, as
bench/reproduce/experiment.py measures it. Printed are tokens a second relative to plain decoding,
with a mark where the output is another one, the draft model's alpha, gamma and c, and the part of
the time that no model's forward takes; then what there is to show: on every request adaptive
against the best constant gamma, both kinds of drafts against the better one, and three models
against two.

    python bench/assistant.py --json bench/results/assistant.json

`--modelled 0.27` counts modelled time, which a busy machine does not change.

By default draft models are made of the target's first layers, two (`fit:2`) and one for the lowest
stage, fitted to the target's answers to these requests until they repeat about the part of their
tokens that `--agreement` asks for. That shows what the schedules make of a given alpha and c, and
nothing about how well a small model can be trained.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import torch

import harness
from fastdraft import DraftConfig
from fastdraft.demo import demo_requests
from fastdraft.drafters import AssistantModel, Staged
from harness import Row

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from experiment import (
    PLAIN,
    Experiment,
    Mode,
    Prompt,
    bars,
    constant,
    figure,
    first_layers,
    options_of,
)

CONSTANTS = tuple(f"constant {gamma}" for gamma in (1, 2, 3, 4, 6, 8))
# A mode, and those of which it should not be slower than the best.
SHOWN = (
    ("adaptive", CONSTANTS),
    ("adaptive and lookups", ("adaptive", "lookups")),
    ("tiny, small", ("adaptive",)),
    ("lookups, small", ("adaptive",)),
)


def modes(tiny: Any, small: Any) -> list[Mode]:
    """What drafts in each mode; the same objects throughout, so that they learn."""

    def adaptive() -> AssistantModel:
        return AssistantModel(small, lookup=None)

    return [
        Mode(PLAIN),
        Mode("lookups", DraftConfig()),
        *(Mode(name, constant(small, int(name.split()[1]))) for name in CONSTANTS),
        Mode("heuristic", AssistantModel(small, schedule="heuristic", lookup=None)),
        Mode("adaptive", adaptive()),
        Mode("adaptive and lookups", AssistantModel(small)),
        Mode("tiny, small", Staged([tiny, adaptive()])),
        Mode("lookups, small", Staged([DraftConfig(), adaptive()])),
    ]


def fitted(target: Any, answers: list[tuple[Any, int]], layers: int, agreement: float) -> Any:
    """The target's first layers, trained on its answers up to an agreement with them.

    Each answer is prompt and answer, (1, tokens), and how many of these are the prompt's.
    """
    model = copy.deepcopy(first_layers(target, layers))
    parameters = [*model.model.layers.parameters(), *model.model.norm.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3)
    agreed = 0.0
    while agreed < agreement:
        right = count = 0
        for output, prompt in answers:
            start = prompt - 1
            hidden = model.model(output[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden[0, start:])
            expected = output[0, start + 1 :]
            right += int((logits.argmax(-1) == expected).sum())
            count += len(expected)
            loss: Any = torch.nn.functional.cross_entropy(logits, expected)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        agreed = right / count
    return model.eval()


def draft_models(experiment: Experiment, prompts: list[Prompt]) -> list[Any]:
    """The tiny and the small draft model: as named, or fitted to the answers to the prompts."""
    options = experiment.options
    target = experiment.model
    answers = []
    if any(name.startswith("fit:") for name in (options.tiny, options.draft)):
        for prompt in prompts:
            inputs = experiment.encode(prompt)
            limit = options.new_tokens
            output = target.generate(**inputs, do_sample=False, max_new_tokens=limit)
            answers.append((output, inputs["input_ids"].shape[1]))
    for name in {options.tiny, options.draft}:
        kind, _, layers = name.partition(":")
        if kind == "fit":
            model = fitted(target, answers, int(layers), options.agreement)
            experiment.add_draft(name, model)
    return [experiment.draft(options.tiny), experiment.draft(options.draft)]


def report(rows: list[Row]) -> None:
    """Prints times plain decoding by mode and request, then how `SHOWN` compare."""
    names = [row["kind"] for row in rows]
    columns = {"": "mode", **{name: name for name in names}}
    lines: list[Row] = []
    for mode in (mode for mode, own in rows[0].items() if isinstance(own, dict)):
        own = [row[mode] for row in rows]
        line: Row = {"mode": mode, **{row["kind"]: row[mode]["speed"] for row in rows}}
        line["mean"] = geometric_mean(each["speed"] for each in own)
        line["differs"] = sum(each["differs"] for each in own)
        for key in ("alpha", "gamma", "c", "overhead"):
            known = [each[key] for each in own if each.get(key) is not None]
            line[key] = mean(known) if known else None
        lines.append(line)
    more = ("mean", "differs", "alpha", "gamma", "c", "overhead")
    harness.show("times plain decoding", columns | {key: key for key in more}, lines)
    ratios = []
    for mode, others in SHOWN:
        if not {mode, *others} <= rows[0].keys():
            continue
        best = {row["kind"]: max(row[other]["speed"] for other in others) for row in rows}
        ratio = {row["kind"]: best[row["kind"]] / row[mode]["speed"] for row in rows}
        ratios.append({"mode": mode, **ratio, "others": ", ".join(others)})
    if ratios:
        harness.show("time over that of the best of others", columns | {"others": "others"}, ratios)


def main() -> None:
    parser = options_of(__doc__, new_tokens=64)
    parser.add_argument("--draft", metavar="MODEL", default="fit:2", help="by path or name, cut:N")
    parser.add_argument(
        "--tiny", metavar="MODEL", default="fit:1", help="drafts for the draft model"
    )
    parser.add_argument("--agreement", type=float, default=0.8, help="of fitted draft models")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy answers")
    parser.add_argument("--mode", action="append", help="only these modes beside plain decoding")
    parser.add_argument(
        "--request", action="append", help="only these of the demo's requests, by name"
    )
    options = parser.parse_args()
    experiment = Experiment(options)
    prompts = [
        Prompt(each.name, each.prompt, answer_start=each.answer_start)
        for each in demo_requests()
        if options.request is None or each.name in options.request
    ]
    tiny, small = draft_models(experiment, prompts)
    chosen = options.mode
    ways = [each for each in modes(tiny, small) if not chosen or each.name in (PLAIN, *chosen)]
    temperature = options.temperature
    rows, _ = experiment.compare(ways, {each.task: ([each], temperature) for each in prompts})
    report(rows)
    drawn, (axis,) = figure(1)
    names = [row["kind"] for row in rows]
    bars(axis, names, {mode.name: [row[mode.name]["speed"] for row in rows] for mode in ways})
    experiment.finish("assistant", {"rows": rows}, drawn)


if __name__ == "__main__":
    main()
