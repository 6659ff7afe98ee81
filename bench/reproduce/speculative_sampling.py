"""The tables of a report on speculative sampling, for any models: 1 to 6, and adaptive gamma, 7.

N. Sakhreliya, P. Jain and A. Gupta, CS7.501 Advanced Natural Language Processing, project, 2024:
GPT-2 models that summarise CNN/DailyMail, sampled by speculative sampling (its algorithm 1).

    python bench/reproduce/speculative_sampling.py --table 1
    python bench/reproduce/speculative_sampling.py --table 6 --target gpt2-large --draft gpt2 \
        --tiny distilgpt2 --dtype float32 --data FOLDER

Without `--draft` and `--tiny` the target's own first layers draft, so many that they cost about
what the report's draft models cost. They were never trained to speak after so few layers and are
seldom right: such a table shows the form, and that time is as the theory has it. For draft models
that are worth something see distil.py.

The report does not say how it measured alpha. It falls as gamma grows, as accepted tokens per
drafted one do; if it is that, 1 + alpha gamma are the tokens of a step. Theorem 6.1 takes another
alpha: how often a token is accepted where those before it were. Given the first for the second it
promises too little, the more the longer the draft, which is where the report's theoretical speeds
fall below its empirical ones. By the tokens of a step its empirical ones are 0.78 to 0.98 of the
theorem's. Both ways are printed here, for the report's figures too. What the theorem leaves out is
that a target forward over a draft takes longer than one over a single token; with `width`, the
measured ratio of the two, it is (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + width)).

Where the report's own figures disagree: its empirical speeds of tables 2, 4 and 5 are against 18.4
ms a token for gpt2-medium and those of table 3 against 9.5 for gpt2, its theoretical ones by the
18.79 and 9.2 of section 4; the theoretical speed of table 1 for gamma 4, 0.998, is that for gamma 3
(for 4 it would be 0.914); in table 6 alpha of the target for gamma 3 is 0.50, in the text 0.48. The
tables stand here as they are printed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from experiment import (
    PLAIN,
    Experiment,
    Measured,
    Mode,
    Prompt,
    bars,
    constant,
    figure,
    options_of,
    recorded,
    short,
)
from prompts import PROMPTS

from fastdraft.drafters import AssistantModel, Staged
from fastdraft.theory import expected_tokens, improvement_factor, staged_cost
from harness import Row, show

# Milliseconds a token of each model by itself, section 4.
ALONE = {"gpt2-large": 32.7, "gpt2-medium": 18.791, "gpt2": 9.2, "distilgpt2": 4.570}

DIFFERENCES = """\
Set-up: the report sampled GPT-2 models (88 to 812 million parameters) with a loop of its own, from
CNN/DailyMail; machine, temperature and number of answers it does not tell. Here: what is printed
below, answers to the benchmark's own prompts or, with --data, to recorded requests for summaries
(Spec-Bench's CNN/DailyMail articles and others), with fastdraft.hf.generate; plain is the generate
of transformers. As in the report c is the time per token of the draft model by itself over that of
the target."""


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
        target, draft, tiny: Its models; the tiny one drafts for the draft model.
        rows: gamma, alpha, seconds a token, empirical speed, theoretical speed; of three models
            gamma, alpha of the tiny and of the draft model, seconds a token, empirical speed.
        cuts: What drafts here without other models, the draft model and the tiny one.
    """

    target: str
    draft: str
    rows: tuple[tuple[float, ...], ...]
    cuts: tuple[str, ...]
    tiny: str | None = None


TABLES = {
    1: Table(
        "gpt2-large",
        "distilgpt2",
        (
            (2, 0.48, 0.0272, 1.202, 1.338),
            (3, 0.36, 0.0277, 1.180, 1.084),
            (4, 0.30, 0.0274, 1.193, 0.998),
            (5, 0.23, 0.0291, 1.123, 0.766),
            (7, 0.18, 0.0300, 1.090, 0.618),
        ),
        ("cut:1",),
    ),
    2: Table(
        "gpt2-medium",
        "gpt2",
        (
            (2, 0.56, 0.0192, 0.958333, 0.946),
            (3, 0.47, 0.0203, 0.906404, 0.727),
            (4, 0.41, 0.0216, 0.851852, 0.566),
            (5, 0.34, 0.0239, 0.769874, 0.438),
            (7, 0.27, 0.0289, 0.636678, 0.309),
        ),
        ("cut:10",),
    ),
    3: Table(
        "gpt2",
        "distilgpt2",
        (
            (2, 0.57, 0.0105, 0.904, 0.950),
            (3, 0.49, 0.0112, 0.848, 0.742),
            (5, 0.37, 0.0139, 0.683, 0.454),
        ),
        ("cut:11",),
    ),
    4: Table(
        "gpt2-medium",
        "distilgpt2",
        (
            (2, 0.46, 0.0178, 1.033, 1.124),
            (3, 0.38, 0.0180, 1.022, 0.913),
            (5, 0.26, 0.0200, 0.920, 0.609),
        ),
        ("cut:2",),
    ),
    5: Table(
        "gpt2-medium",
        "gpt2",
        (
            (2, 0.59, 0.49, 0.0154, 1.194),
            (3, 0.51, 0.52, 0.0169, 1.088),
            (4, 0.46, 0.52, 0.0181, 1.016),
            (5, 0.40, 0.52, 0.0186, 0.989),
        ),
        ("cut:10", "cut:2"),
        tiny="distilgpt2",
    ),
    6: Table(
        "gpt2-large",
        "gpt2",
        (
            (2, 0.59, 0.48, 0.0227, 1.440),
            (3, 0.50, 0.50, 0.0235, 1.391),
            (4, 0.47, 0.48, 0.0259, 1.262),
            (5, 0.41, 0.48, 0.0251, 1.302),
        ),
        ("cut:4", "cut:1"),
        tiny="distilgpt2",
    ),
}

# Table 7, gpt2-large and distilgpt2: alpha, seconds a token and empirical speed, by the schedule
# that comes nearest here. The constant ones are those of table 1.
ADAPTIVE = {
    "constant 2": (0.48, 0.0272, 1.202),
    "constant 3": (0.36, 0.0277, 1.180),
    "heuristic": (0.45, 0.0267, 1.224),
}


def prompts(experiment: Experiment) -> list[Prompt]:
    """Summaries to write; the same again with other seeds where there are fewer than samples."""
    options = experiment.options
    if options.data is not None:
        every = recorded(options.data, {"summarization": "summary"})["summary"]
    else:
        every = [Prompt("summary", each.text) for each in PROMPTS if each.task == "summary"]
    fitting = list(islice(experiment.fitting(every), options.samples))
    return list(islice(cycle(fitting), options.samples))


def measure(
    experiment: Experiment, drafts: dict[str, str], report: dict[str, str], modes: Sequence[Mode]
) -> dict[str, Measured]:
    """The modes, beside the target and each draft model generating by itself; prints the latter.

    Args:
        experiment: The models.
        drafts: The draft models' names, by their role.
        report: The models of the report, by their role.
        modes: What else to measure.
    """
    alone = [Mode(f"{role} alone", model=experiment.draft(name)) for role, name in drafts.items()]
    found = experiment.measure(
        [Mode(PLAIN), *alone, *modes],
        prompts(experiment),
        temperature=experiment.options.temperature,
        title=f"Table {experiment.options.table}",
    )
    here = {"target": experiment.name, **drafts}
    show(
        "Models by themselves, ms a token (the report's section 4)",
        {"": "role", "report": "report", "ms": "report ms", "here": "name", "ms ": "ms"},
        [
            {
                "role": role,
                "report": report[role],
                "report ms": ALONE[report[role]],
                "name": short(name),
                "ms": found[PLAIN if role == "target" else f"{role} alone"].ms,
            }
            for role, name in here.items()
        ],
    )
    return found


def theory(
    own: Measured, plain: Measured, *, alpha: float, gamma: int, c: float
) -> dict[str, float]:
    """Theorem 6.1 and what was measured, without and with what a wider forward takes."""
    width = own.forward / plain.forward
    speed, plainly = plain.ms / own.ms, improvement_factor(alpha, gamma, c)
    wider = expected_tokens(alpha, gamma) / (gamma * c + width)
    return {
        "alpha": alpha,
        "theory": plainly,
        "measured / theory": speed / plainly,
        "width": width,
        "wider theory": wider,
        "measured / wider theory": speed / wider,
    }


def beside(heading: str, key: str, own: str | None = None) -> dict[str, str]:
    """Two columns: what the report has under `key`, and what was measured here."""
    return {f"{heading}\nreport": f"report {key}", f"{heading}\nhere": own or key}


THEORY = {
    "here: alpha\na token": "alpha",
    "\ntheorem": "theory",
    "measured/\ntheorem": "measured / theory",
    "\nwidth": "width",
    "theorem\nwith width": "wider theory",
    "measured/\nthat": "measured / wider theory",
}


def two_models(experiment: Experiment, number: int) -> tuple[Row, Any]:
    """Tables 1 to 4."""
    table = TABLES[number]
    name = experiment.options.draft or table.cuts[0]
    draft = experiment.draft(name)
    gammas = [int(row[0]) for row in table.rows]
    found = measure(
        experiment,
        {"draft": name},
        {"target": table.target, "draft": table.draft},
        [Mode(f"gamma {gamma}", constant(draft, gamma)) for gamma in gammas],
    )
    plain, c = found[PLAIN], found["draft alone"].ms / found[PLAIN].ms
    report_c = ALONE[table.draft] / ALONE[table.target]
    rows: list[Row] = []
    for gamma, (_, rate, seconds, speed, theorem) in zip(gammas, table.rows, strict=True):
        own = found[f"gamma {gamma}"]
        tokens = (1 + rate * gamma) / (1 + gamma * report_c)
        rows.append(
            {
                "gamma": gamma,
                "report rate": rate,
                "report ms": 1000 * seconds,
                "report speed": speed,
                "report theorem": theorem,
                "report theorem by tokens": tokens,
                "report measured / that": speed / tokens,
                "rate": own.acceptance_rate(),
                "ms": own.ms,
                "speed": plain.ms / own.ms,
                "theorem as the report": improvement_factor(own.acceptance_rate(), gamma, c),
                **theory(own, plain, alpha=own.assistant().alpha, gamma=gamma, c=c),
                "measured": own.beside(plain),
            }
        )
    show(
        f"Table {number}: {table.draft} drafts for {table.target}, c = {report_c:.2f}; "
        f"{short(name)} for {experiment.name}, c = {c:.2f}",
        {"gamma": "gamma"}
        | beside("accepted/drafted", "rate")
        | beside("ms a token", "ms")
        | beside("speed", "speed")
        | beside("theoretical", "theorem", "theorem as the report"),
        rows,
    )
    show(
        "The theorem by the tokens of a step",
        {
            "gamma": "gamma",
            "report:\ntheorem": "report theorem by tokens",
            "measured/\nthat ": "report measured / that",
            **THEORY,
        },
        rows,
    )
    drawn, (left, right) = figure(2)
    drawn.suptitle(
        f"Table {number}: {table.draft}, {table.target} / {short(name)}, {experiment.name}"
    )
    lines = {
        "report: accepted/drafted": "report rate",
        "here: accepted/drafted": "rate",
        "here: alpha a token": "alpha",
    }
    curves(left, "acceptance", rows, lines)
    lines = {
        "report: measured": "report speed",
        "report: theoretical": "report theorem",
        "report: theorem by tokens a step": "report theorem by tokens",
        "here: measured": "speed",
        "here: theorem": "theory",
        "here: theorem with width": "wider theory",
    }
    curves(right, "speed", rows, lines)
    return {"c": c, "report c": report_c, "rows": rows, "plain": plain.beside(plain)}, drawn


def three_models(experiment: Experiment, number: int) -> tuple[Row, Any]:
    """Tables 5 and 6.

    The tiny model drafts gamma tokens for a forward of the draft model, which so emits up to
    gamma + 1, and these are drafted for the target. The report does not say how many those were.
    Where fewer are missing for a whole draft, the tiny model drafts fewer: the theorem is taken for
    the mean lengths.
    """
    table = TABLES[number]
    assert table.tiny is not None
    names = {
        "draft": experiment.options.draft or table.cuts[0],
        "tiny": experiment.options.tiny or table.cuts[1],
    }
    draft, tiny = (experiment.draft(name) for name in names.values())
    staged = [short(names["tiny"]), short(names["draft"]), experiment.name]
    gammas = [int(row[0]) for row in table.rows]
    modes = []
    for gamma in gammas:
        three = Staged([constant(tiny, gamma), constant(draft, gamma + 1)])
        modes.append(Mode(f"two, gamma {gamma}", constant(draft, gamma + 1)))
        modes.append(Mode(f"three, gamma {gamma}", three))
    report = {"target": table.target, "draft": table.draft, "tiny": table.tiny}
    found = measure(experiment, names, report, modes)
    plain = found[PLAIN]
    c, sub_c = (found[f"{role} alone"].ms / plain.ms for role in names)
    rows: list[Row] = []
    for gamma, (_, below, above, seconds, speed) in zip(gammas, table.rows, strict=True):
        own, two = found[f"three, gamma {gamma}"], found[f"two, gamma {gamma}"]
        sub_length, length = round(own.assistant(0).gamma), round(own.assistant().gamma)
        cost = staged_cost(c, alpha=own.assistant(0).alpha, gamma=sub_length, sub_c=sub_c)
        rows.append(
            {
                "gamma": gamma,
                "report rate of draft": below,
                "report rate of target": above,
                "report ms": 1000 * seconds,
                "report speed": speed,
                "rate of draft": own.acceptance_rate(0),
                "rate of target": own.acceptance_rate(),
                "ms": own.ms,
                "speed": plain.ms / own.ms,
                "speed of two": plain.ms / two.ms,
                "alpha of draft": own.assistant(0).alpha,
                "length of tiny drafts": own.assistant(0).gamma,
                "length of drafts": own.assistant().gamma,
                **theory(own, plain, alpha=own.assistant().alpha, gamma=length, c=cost),
                "measured": own.beside(plain),
                "measured of two": two.beside(plain),
            }
        )
    show(
        f"Table {number}: {' for '.join((table.tiny, table.draft, table.target))}; "
        f"{' for '.join(staged)}, "
        f"c = {sub_c:.2f} and {c:.2f}",
        {"gamma": "gamma"}
        | beside("alpha draft", "rate of draft")
        | beside("alpha target", "rate of target")
        | beside("ms a token", "ms")
        | beside("speed", "speed")
        | {"without\nthe tiny one": "speed of two"},
        rows,
    )
    show(
        "The theorem, staged; the report has none",
        {
            "gamma": "gamma",
            "tokens a draft\nof the tiny": "length of tiny drafts",
            "\nand draft": "length of drafts",
            "alpha a token\nof the draft": "alpha of draft",
            **THEORY,
        },
        rows,
    )
    drawn, (left, right) = figure(2)
    drawn.suptitle(f"Table {number}: {', '.join(staged)}")
    lines = {
        "report: alpha, draft": "report rate of draft",
        "report: alpha, target": "report rate of target",
        "here: alpha, draft": "rate of draft",
        "here: alpha, target": "rate of target",
    }
    curves(left, "accepted / drafted", rows, lines)
    lines = {
        "report: three models": "report speed",
        "here: three models": "speed",
        "here: two models": "speed of two",
        "here: theorem with width": "wider theory",
    }
    curves(right, "speed", rows, lines)
    return {"c": c, "sub c": sub_c, "rows": rows, "plain": plain.beside(plain)}, drawn


def adaptive(experiment: Experiment) -> tuple[Row, Any]:
    """Table 7.

    The report makes gamma greater or smaller as tokens are accepted or not, and does not say by how
    much. The heuristic of assisted generation is such a rule; it begins with the report's gamma.
    """
    name = experiment.options.draft or TABLES[1].cuts[0]
    draft = experiment.draft(name)
    heuristic = AssistantModel(draft, schedule="heuristic", num_tokens=3, lookup=None)
    modes = [
        *(Mode(f"constant {gamma}", constant(draft, gamma)) for gamma in (2, 3)),
        Mode("heuristic", heuristic),
        Mode("adaptive", AssistantModel(draft, lookup=None)),
    ]
    found = measure(
        experiment, {"draft": name}, {"target": TABLES[1].target, "draft": TABLES[1].draft}, modes
    )
    plain = found[PLAIN]
    c = found["draft alone"].ms / plain.ms
    rows: list[Row] = []
    for mode in modes:
        own = found[mode.name]
        rate, seconds, speed = ADAPTIVE.get(mode.name, (None, None, None))
        rows.append(
            {
                "schedule": mode.name,
                "report rate": rate,
                "report ms": seconds and 1000 * seconds,
                "report speed": speed,
                "rate": own.acceptance_rate(),
                "ms": own.ms,
                "speed": plain.ms / own.ms,
                "gamma": own.assistant().gamma,
                "alpha": own.assistant().alpha,
                "measured": own.beside(plain),
            }
        )
    show(
        f"Table 7: distilgpt2 drafts for gpt2-large; {short(name)} for {experiment.name}, "
        f"c = {c:.2f}. The report's adaptive gamma stands beside the heuristic: it begins with 3 "
        "too,\nand fluctuates around 2",
        {"schedule": "schedule"}
        | beside("accepted/drafted", "rate")
        | beside("ms a token", "ms")
        | beside("speed", "speed")
        | {"tokens a draft\nhere": "gamma", "alpha a token\nhere": "alpha"},
        rows,
    )
    drawn, (axis,) = figure(1)
    bars(
        axis,
        [row["schedule"] for row in rows],
        {
            "here": [row["speed"] for row in rows],
            "report": [row["report speed"] for row in rows],
        },
    )
    axis.set(ylabel="speed", title=f"Table 7: {short(name)}, {experiment.name}")
    axis.axhline(1, color="black", linewidth=0.8)
    return {"c": c, "rows": rows, "plain": plain.beside(plain)}, drawn


def curves(axis: Any, label: str, rows: Sequence[Row], lines: dict[str, str]) -> None:
    """Draws columns of `rows` over gamma: the report's in orange, those from here in blue."""
    styles = {"report": iter(("-", "--", ":")), "here": iter(("-", "--", ":"))}
    colours = {"report": "tab:orange", "here": "tab:blue"}
    gammas = [row["gamma"] for row in rows]
    for name, key in lines.items():
        whose = name.partition(":")[0]
        axis.plot(
            gammas,
            [row[key] for row in rows],
            color=colours[whose],
            linestyle=next(styles[whose]),
            marker="o",
            label=name,
        )
    axis.set(xlabel="gamma", ylabel=label)
    axis.set_xticks(gammas)
    axis.legend(fontsize="small")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--table", type=int, required=True, choices=range(1, 8))
    parser.add_argument("--draft", metavar="MODEL", help="by path or name, or cut:N")
    parser.add_argument("--tiny", metavar="MODEL", help="drafts for the draft model: tables 5, 6")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    if options.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {options.temperature}")
    if options.tiny is not None and options.table not in (5, 6):
        parser.error(f"--tiny is for tables 5 and 6, got table {options.table}")

    experiment = Experiment(options)
    number = options.table
    if number == 7:
        results, drawn = adaptive(experiment)
    elif number in (5, 6):
        results, drawn = three_models(experiment, number)
    else:
        results, drawn = two_models(experiment, number)
    print(f"\n{DIFFERENCES}")
    experiment.finish(f"speculative_sampling_{number}", results, drawn)


if __name__ == "__main__":
    main()
