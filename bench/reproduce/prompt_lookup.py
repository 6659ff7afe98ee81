"""Prompt lookup's results: summaries, answers from a context, and conversations of two turns.

A. Saxena, Prompt Lookup Decoding, 2023: greedy, n-grams of up to 3 tokens, 10 draft tokens.

    python bench/reproduce/prompt_lookup.py summaries
    python bench/reproduce/prompt_lookup.py context-qa --data FOLDER
    python bench/reproduce/prompt_lookup.py chat --data FOLDER --samples 16

Each answer is decoded plainly, with transformers' prompt lookup, with fastdraft's (which proposes
the same), and with the default drafter. In a conversation's second turn the model's own first
answer stands before the question.
"""

from __future__ import annotations

import random
from pathlib import Path

from experiment import PLAIN, Experiment, Mode, Prompt, options_of, records, turns
from prompts import PROMPTS

from fastdraft import DraftConfig
from fastdraft.demo import demo_requests
from harness import show

# What the author says of each experiment; the figures of his plots are not in his text.
REPORTED = {
    "summaries": "2.4 times plain on average (CNN/DailyMail, 100 articles), never less than plain "
    "within the margin of error",
    "context-qa": "2.4 times plain on average (HAGRID, 100 examples, all evidence as the context), "
    "never less than plain within the margin of error",
    "chat": "MT-bench, 80 conversations: turn 1 gains about as much as summaries (2.4), turn 0 "
    "much less; roleplay gains least, coding very much in turn 1, extraction most in turn 0",
}

DIFFERENCES = """\
Set-up: the author ran Mistral-7B-Instruct-v0.1 on an A100 with 40 GB. Here: the model and the
machine printed below, the benchmark's own prompts or, with --data, recorded ones: Spec-Bench's
CNN/DailyMail articles and SummEdits' documents, ClapNQ's and other questions with their passages in
place of HAGRID, MT-bench's questions. The prompt's forward is left out of all times."""

# The benchmark's own, and the recorded family in place of them.
QUESTIONS = {
    "summaries": (PROMPTS["summary"], "summarization"),
    "context-qa": (
        [
            *PROMPTS["web"],
            *(Prompt(each.prompt) for each in demo_requests() if each.name == "document"),
        ],
        "rag_qa",
    ),
}

_CHATS = [
    (
        "Write a short letter to a hotel in which you ask for a quiet room for three nights.",
        "Now write the letter again, and also ask when breakfast is served.",
    ),
    (
        "Write a Python function that gives the mean of a list of numbers.",
        "Add a check that the list is not empty, and give me the whole function again.",
    ),
    (
        "List the names and the years in this text: Ada Brandt founded the mill in 1884, her son "
        "Karl sold it in 1921, and Irma Vogel turned it into a museum in 1996.",
        "Now put the same facts into a table, sorted by year.",
    ),
    (
        "You are the captain of an old ferry. Tell me about your strangest passenger.",
        "And what did the passenger say when the ferry arrived?",
    ),
]


def modes() -> list[Mode]:
    return [
        Mode(PLAIN),
        Mode(
            "transformers", options={"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
        ),
        Mode("prompt lookup", DraftConfig.prompt_lookup(max_ngram=3, num_tokens=10)),
        Mode("default", DraftConfig()),
    ]


def conversations(folder: Path | None) -> list[tuple[str, str]]:
    """Both questions of each, shuffled where they are recorded."""
    if folder is None:
        return _CHATS
    found: dict[tuple[str, str], None] = {}
    for record in records(folder, "mtbench"):
        said = turns(record["prompt"])
        if len(said) == 3:
            found[said[0], said[2]] = None
    every = list(found)  # several models answered the same questions
    random.Random(0).shuffle(every)
    return every


def chats(experiment: Experiment) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of turn 0 and those of turn 1."""
    first: list[Prompt] = []
    second: list[Prompt] = []
    for question, next_question in conversations(experiment.options.data):
        opening = Prompt(question)
        if len(first) < experiment.options.samples and experiment.chosen([opening]):
            answer = experiment.answer(opening)
            first.append(opening)
            second.append(Prompt(next_question, before=(question, answer)))
    return first, second


def main() -> None:
    parser = options_of(__doc__, samples=4, new_tokens=64)
    parser.add_argument("kind", choices=list(REPORTED), help="which experiment")
    options = parser.parse_args()
    experiment = Experiment(options)
    ways = modes()
    if options.kind == "chat":
        asked = dict(zip(("turn 0", "turn 1"), chats(experiment), strict=True))
    else:
        own, family = QUESTIONS[options.kind]
        asked = experiment.prompts({options.kind: own}, {options.kind: [family]})

    rows = experiment.compare(ways, {name: (each, 0.0) for name, each in asked.items()})
    names = [mode.name for mode in ways]
    show(
        f"Prompt lookup, {options.kind}: tokens a second, mean and standard deviation",
        {"": "kind", "answers": "answers"}
        | {f"{name}\n{key}": (name, key) for name in names for key in ("tokens/s", "deviation")},
        rows,
    )
    show(
        "Times plain, of all answers and of the one that gains least",
        {"": "kind"}
        | {
            f"{name}\n{key}": (name, key)
            for key in ("times plain", "least speed")
            for name in names[1:]
        },
        rows,
    )
    reported = f"Reported: {REPORTED[options.kind]}.\n{DIFFERENCES}"
    experiment.finish({"rows": rows}, reported)


if __name__ == "__main__":
    main()
