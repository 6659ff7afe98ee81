"""Draft models on the demo's requests: every schedule, with lookups beside it, and staged.

The target answers each request greedily, plainly and with each way of drafting in turn, `--repeats`
times over; of each the least time counts, since other processes only ever add some. Where they add
much, `--processor-time` counts what the processor spent on this one, meant for one torch thread.
Every output is held against the plain one. Printed are tokens a second relative to plain decoding,
the draft model's alpha, gamma and c, and the part of the time that no model's forward takes; then
what there is to show: on every request adaptive against the best constant gamma, both kinds of
drafts against the better one, and three models against two.

    python bench/assistant.py --json bench/results/assistant.json

Without `--assistant` and `--tiny`, draft models are made of the target's first layers, `--layers`
of them and one for the lowest stage, fitted to the target's answers to these requests until they
repeat about the part of their tokens that `--agreement` asks for. That shows what the schedules
make of a given alpha and c, and nothing about how well a small model can be trained.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import DraftConfig, hf
from fastdraft.demo import demo_requests, ensure_model
from fastdraft.drafters import AssistantModel, Staged
from index import machine

CONSTANTS = tuple(f"constant {gamma}" for gamma in (1, 2, 3, 4, 6, 8))
PLAIN = "plain"
# A mode, and those of which it should not be slower than the best.
SHOWN = (
    ("adaptive", CONSTANTS),
    ("adaptive and lookups", ("adaptive", "lookups")),
    ("tiny, small", ("adaptive",)),
    ("lookups, small", ("adaptive",)),
)


@dataclass
class Forwards:
    """Seconds that models' forwards took by `clock`, by hooks."""

    clock: Callable[[], float]
    seconds: float = 0.0
    _started: float = 0.0

    def watch(self, model: Any) -> None:
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._stop())

    def _start(self) -> None:
        self._started = self.clock()

    def _stop(self) -> None:
        self.seconds += self.clock() - self._started


def modes(tiny: Any, small: Any) -> dict[str, Any]:
    """What drafts in each mode; the same objects throughout, so that they learn."""

    def alone(schedule: Any = "adaptive", **options: Any) -> AssistantModel:
        return AssistantModel(small, schedule=schedule, lookup=None, **options)

    return {
        PLAIN: None,
        "lookups": "lookups",
        **{mode: alone("constant", num_tokens=int(mode.split()[1])) for mode in CONSTANTS},
        "heuristic": alone("heuristic"),
        "adaptive": alone(),
        "adaptive and lookups": AssistantModel(small),
        "tiny, small": Staged([tiny, alone()]),
        "lookups, small": Staged([DraftConfig(), alone()]),
    }


def answers(
    target: Any, tokenizer: Any, new_tokens: int, names: list[str] | None
) -> list[tuple[str, Any, Any]]:
    """Name, inputs and plain answer of each of the demo's requests, or of those with `names`."""
    found = []
    for request in demo_requests():
        if names is not None and request.name not in names:
            continue
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": request.prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        inputs = tokenizer(
            text + request.answer_start, add_special_tokens=False, return_tensors="pt"
        )
        output = target.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
        found.append((request.name, inputs, output))
    return found


def first_layers(model: Any, layers: int) -> Any:
    """The first layers of a model, with its embedding, last norm and head; weights are shared."""
    count = model.config.get_text_config().num_hidden_layers
    # A deep copy takes what it is told of as copied already.
    small = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for module in small.base_model.modules():
        for key, child in module.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                setattr(module, key, child[:layers])
    config = small.config.get_text_config()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return small


def fitted(target: Any, texts: list[tuple[str, Any, Any]], layers: int, agreement: float) -> Any:
    """The target's first layers, trained on its answers up to an agreement with them."""
    model = copy.deepcopy(first_layers(target, layers))
    parameters = [*model.model.layers.parameters(), *model.model.norm.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3)
    agreed = 0.0
    while agreed < agreement:
        right = count = 0
        for _, inputs, output in texts:
            start = inputs["input_ids"].shape[1] - 1
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


def measure(
    target: Any,
    tiny: Any,
    small: Any,
    texts: list[tuple[str, Any, Any]],
    *,
    new_tokens: int,
    repeats: int,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """For each request and mode: seconds, tokens, and what the drafts were worth."""
    forwards = Forwards(clock)
    for model in (target, tiny, small):
        forwards.watch(model)
    drafters = modes(tiny, small)
    rows: dict[str, dict[str, Any]] = {name: {} for name, _, _ in texts}
    for _ in range(repeats):
        for name, inputs, expected in texts:
            for mode, drafter in drafters.items():
                forwards.seconds = 0.0
                options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens}
                output: Any = None
                started = clock()
                if mode == PLAIN:
                    sequences = target.generate(**inputs, **options)
                else:
                    chosen = None if drafter == "lookups" else drafter
                    output = hf.generate(target, **inputs, **options, drafter=chosen)
                    sequences = output.sequences
                seconds = clock() - started
                row = rows[name].setdefault(mode, {"seconds": math.inf})
                if seconds < row["seconds"]:
                    row |= {
                        "seconds": seconds,
                        "tokens": sequences.shape[1] - inputs["input_ids"].shape[1],
                        "equal": torch.equal(sequences, expected),
                        "overhead": 1 - forwards.seconds / seconds,
                    }
                    if output is not None:
                        row["tokens_a_step"] = output.stats.mean_accepted_tokens
                    if output is not None and output.assistants:
                        stats = output.assistants[-1]
                        row |= {"alpha": stats.alpha, "gamma": stats.gamma, "c": stats.c}
            say(name)
    return rows


def report(rows: dict[str, dict[str, Any]]) -> None:
    """Prints a line for each mode: speeds by request, their geometric mean, and the draft model.

    Then one for each of `SHOWN`: its time over that of the best other one, by request.
    """
    names = list(rows)
    print(f"{'':22}" + "".join(f"{name:>10}" for name in names) + f"{'mean':>8}   alpha gamma   c")
    for mode in rows[names[0]]:
        speeds = [
            rows[name][mode]["tokens"]
            / rows[name][mode]["seconds"]
            * rows[name][PLAIN]["seconds"]
            / rows[name][PLAIN]["tokens"]
            for name in names
        ]
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        marks = ["" if rows[name][mode]["equal"] else "!" for name in names]
        line = "".join(
            f"{speed:.2f}{mark}".rjust(10) for speed, mark in zip(speeds, marks, strict=True)
        )
        about = ""
        drafted = [rows[name][mode] for name in names if rows[name][mode].get("c") is not None]
        if drafted:
            about = "   " + " ".join(
                f"{sum(row[key] for row in drafted) / len(drafted):5.2f}"
                for key in ("alpha", "gamma", "c")
            )
        overhead = sum(rows[name][mode]["overhead"] for name in names) / len(names)
        print(f"{mode:22}{line}{mean:8.2f}{about:21} beside forwards {overhead:.1%}")
    print("\ntime over that of the best of")
    for mode, others in SHOWN:
        ratios = [
            row[mode]["seconds"] / min(row[other]["seconds"] for other in others)
            for row in rows.values()
        ]
        line = "".join(f"{ratio:10.3f}" for ratio in ratios)
        print(f"{mode:22}{line}   {others[0] if len(others) == 1 else ', '.join(others)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="the target, by path or name; the demo model by default")
    parser.add_argument("--assistant", help="the draft model, by path or name")
    parser.add_argument("--tiny", help="the draft model's own, by path or name")
    parser.add_argument("--layers", type=int, default=2, help="of the fitted draft model")
    parser.add_argument("--agreement", type=float, default=0.8, help="of the fitted draft model")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="on a busy machine")
    parser.add_argument(
        "--request", action="append", help="only these of the demo's requests, by name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()

    path = options.model or ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    target: Any = AutoModelForCausalLM.from_pretrained(path)
    target.eval()
    texts = answers(target, tokenizer, options.max_new_tokens, options.request)
    drafts: list[Any] = []
    for given, layers in ((options.tiny, 1), (options.assistant, options.layers)):
        if given:
            drafts.append(AutoModelForCausalLM.from_pretrained(given))
            drafts[-1].eval()
        else:
            drafts.append(fitted(target, texts, layers, options.agreement))
    tiny, small = drafts
    rows = measure(
        target,
        tiny,
        small,
        texts,
        new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        clock=time.process_time if options.processor_time else time.perf_counter,
        say=lambda name: print(f"{name} ...", flush=True),
    )
    results = {**machine(), "options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}
    report(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
