"""The plots of assisted generation's announcement: greedy by task, sampled by temperature.

J. Gante, Assisted Generation: a new direction toward low-latency text generation, 2023.

    python bench/reproduce/assisted_generation.py greedy
    python bench/reproduce/assisted_generation.py temperature --draft MODEL

Each answer is decoded plainly, by transformers' own assisted generation with the announcement's
heuristic (5 draft tokens at first, 2 more where all were accepted, else one less), by fastdraft
with the same heuristic, with the adaptive schedule, and with lookups beside it. Greedy outputs are
held against the plain ones.

Without `--draft` the target's own first layers draft. They were never trained to speak after so few
layers and are seldom right: this shows the form, and what each schedule makes of a draft model that
does not pay.
"""

from __future__ import annotations

from typing import Any

from experiment import PLAIN, Experiment, Mode, Prompt, options_of, short

from fastdraft.demo import demo_requests
from fastdraft.drafters import AssistantModel
from harness import show

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
FAMILIES = {
    "summary": ("summarization",),
    "translation": ("translation",),
    "document": ("rag_qa",),
    "code": ("codegen",),
    "chat": ("chat_arena",),
}

ANNOUNCED = """\
The announcement's plots are interactive and their figures are not in its text. It says: up to 2
times as fast where the target fits into the GPU's memory, up to 3 with 8-bit weights, up to 10
where weights are offloaded; most in tasks that are grounded in their input, such as summaries;
the draft model should be at least ten times smaller; and the higher the temperature, the less is
gained."""

DIFFERENCES = """\
Set-up: the announcement's text does not say which models and GPUs its plots are of; its example is
pythia-1.4b with pythia-160m. Its drafts were chosen greedily, for sampled answers too. Here: the
models and the machine printed below, the demo's requests or, with --data, recorded ones; drafts are
drawn at the target's temperature and verified by speculative sampling, as by transformers of today.
Both with batches of one."""


def modes(draft: Any) -> list[Mode]:
    # What transformers reads of the draft model's configuration.
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return [
        Mode(PLAIN),
        Mode("transformers", options={"assistant_model": draft}),
        Mode("heuristic", AssistantModel(draft, schedule="heuristic", lookup=None)),
        Mode("adaptive", AssistantModel(draft, lookup=None)),
        Mode("with lookups", AssistantModel(draft)),
    ]


def main() -> None:
    parser = options_of(__doc__, new_tokens=48, repeats=2)
    parser.add_argument("plot_of", choices=["greedy", "temperature"], help="which plot")
    parser.add_argument(
        "--draft", metavar="MODEL", default="cut:2", help="by path or name, or cut:N"
    )
    options = parser.parse_args()
    experiment = Experiment(options)
    own = {
        each.name: [Prompt(each.prompt, answer_start=each.answer_start)] for each in demo_requests()
    }
    tasks = experiment.prompts(own, FAMILIES)
    if options.plot_of == "greedy":
        kinds = {task: (each, 0.0) for task, each in tasks.items()}
    else:
        # All tasks in turn; the open ones, which are sampled most, stand last.
        last_first = [*tasks.values()][::-1]
        mixed = [each[at] for at in range(options.samples) for each in last_first if at < len(each)]
        kinds = {
            f"temperature {temperature:g}": (mixed[: options.samples], temperature)
            for temperature in TEMPERATURES
        }
    ways = modes(experiment.draft(options.draft))
    names = [mode.name for mode in ways]
    rows = experiment.compare(ways, kinds)
    show(
        f"Assisted generation, {options.plot_of}, {short(options.draft)} drafts: times plain",
        {"": "kind", "plain, ms\na token": (PLAIN, "ms")}
        | {f"\n{name}": (name, "speed") for name in names[1:]}
        | {
            f"{name}:\n{value}": (name, value)
            for name in ("heuristic", "adaptive")
            for value in ("alpha", "gamma")
        },
        rows,
    )
    experiment.finish({"rows": rows}, f"{ANNOUNCED}\n{DIFFERENCES}")


if __name__ == "__main__":
    main()
