"""What the reproductions share: models, prompts, fair timing, tables.

Every way of decoding answers every prompt in turn, `--repeats` times over, and each round begins
with another, so that what else the machine does falls on all alike. A generation is timed from its
first new token on: the prompt's forward is the same for all, what a draft model takes to read the
prompt is not left out. Of a prompt's repeats the median counts, and of the prompts the mean.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from fastdraft import DraftStats, hf
from fastdraft.demo import Target, TargetError, load_target
from fastdraft.demo.comparison import greedy_options
from fastdraft.drafters import AssistantModel
from fastdraft.errors import FastdraftError
from fastdraft.replay.display import progress
from fastdraft.replay.lines import RecordError, family_files, parse_lines
from fastdraft.stats import AssistantStats

# The other benchmarks lie one folder up.
sys.path.insert(0, str(Path(__file__).parent.parent))

import harness
from harness import Row

PLAIN = "plain"


class Prompt(NamedTuple):
    """What a user says, at the end of a conversation or at its beginning.

    Attributes:
        text: The user's last words.
        before: The conversation before them, what user and model said in turn.
        answer_start: How the answer begins; given to the model, not generated.
    """

    text: str
    before: tuple[str, ...] = ()
    answer_start: str = ""


class Mode(NamedTuple):
    """One way to decode.

    Attributes:
        name: In tables.
        drafter: Decodes with `hf.generate`; without one transformers does it by itself.
        options: Further ones of transformers' `generate`.
        model: What generates in place of the target.
    """

    name: str
    drafter: Any = None
    options: Row = {}  # noqa: RUF012 - read only
    model: Any = None


class Answer(NamedTuple):
    """One generation.

    Attributes:
        tokens: The new tokens.
        seconds: What each took of those that came after the first ones; None without any.
        stats: With fastdraft, what the drafts were worth.
        assistants: And those of each draft model, the smallest first.
    """

    tokens: list[int]
    seconds: float | None
    stats: DraftStats | None
    assistants: list[AssistantStats]


class Measured(NamedTuple):
    """What a mode came to.

    Attributes:
        answers: By prompt and repeat; all are timed.
        forwards: Seconds of the target's forwards after the prompt's.
    """

    answers: list[list[Answer]]
    forwards: list[float]

    @property
    def seconds(self) -> list[float]:
        """A token of each prompt's answer, the median of its repeats."""
        return [statistics.median(run.seconds or 0.0 for run in runs) for runs in self.answers]

    @property
    def ms(self) -> float:
        """Milliseconds a token, the mean of the prompts."""
        return 1000 * statistics.mean(self.seconds)

    def assistant(self, level: int = -1) -> AssistantStats:
        """What the drafts of a draft model were worth, over all answers and places in a draft.

        `level` is the draft model's among the stages; -1 drafts for the target.
        """
        every = [run for runs in self.answers for run in runs]
        found = [run.assistants[level] for run in every if run.assistants]
        return AssistantStats(
            drafts=sum(each.drafts for each in found),
            drafted=sum(each.drafted for each in found),
            judged=(sum(sum(each.judged) for each in found),),
            accepted=(sum(sum(each.accepted) for each in found),),
        )

    def acceptance_rate(self, level: int = -1) -> float:
        """Accepted per drafted token; 0 for none."""
        stats = self.assistant(level)
        return sum(stats.accepted) / stats.drafted if stats.drafted else 0.0

    def beside(self, plain: Measured) -> Row:
        """Its figures beside those of plain decoding."""
        own, base = self.seconds, plain.seconds
        rates = [1 / seconds for seconds in own]
        every = [run for runs in self.answers for run in runs]
        stats = sum((run.stats for run in every if run.stats is not None), DraftStats())
        row: Row = {
            "ms": self.ms,
            "speed": plain.ms / self.ms,
            "least speed": min(b / o for b, o in zip(base, own, strict=True)),
            "tokens/s": statistics.mean(rates),
            "deviation": statistics.pstdev(rates),
            "times plain": statistics.mean(rates) / statistics.mean(1 / each for each in base),
            "differs": sum(
                one[0].tokens != other[0].tokens
                for one, other in zip(self.answers, plain.answers, strict=True)
            ),
            "tokens a step": stats.mean_accepted_tokens,
        }
        if self.assistant().drafts:
            known = [run.assistants[-1].c for run in every if run.assistants]
            c = statistics.median([c for c in known if c is not None] or [float("nan")])
            row |= {"alpha": self.assistant().alpha, "gamma": self.assistant().gamma, "c": c}
        return row


class Streamer(BaseStreamer):
    """Passes new tokens to `on_tokens` as they come, in every mode alike."""

    def __init__(self, on_tokens: Callable[[list[int]], object]) -> None:
        self._on_tokens = on_tokens
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Takes what `generate` streams: first the prompt, then the new tokens."""
        if not self._prompt:
            self._on_tokens(value.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing waits for the end."""


class Experiment:
    """The models, and how they are run.

    Args:
        options: Those of `options_of`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if options.json is not None and not options.json.parent.is_dir():
            raise SystemExit(f"--json must be in a folder that exists, got {options.json}")
        self.options = options
        self.target = _load(options.target, options.device, options.dtype)
        self._drafts: dict[str, Any] = {}
        self._warm: set[str] = set()

    @property
    def model(self) -> Any:
        """The target model."""
        return self.target.model

    @property
    def name(self) -> str:
        """The target's, as `short`."""
        return short(self.target.name)

    def draft(self, name: str) -> Any:
        """A draft model: `cut:N`, the target's first N layers, or a path or name."""
        if name not in self._drafts:
            if name.startswith("cut:"):
                self._drafts[name] = _cut(self.model, name)
            else:
                dtype = str(self.model.dtype).removeprefix("torch.")
                loaded = _load(name, str(self.model.device), dtype)
                if self.target.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
                    raise SystemExit(f"{name} must have the target's tokenizer, got another one")
                self._drafts[name] = loaded.model
        return self._drafts[name]

    def encode(self, prompt: Prompt) -> Any:
        """The model's inputs, one row."""
        # Without a chat template the answer begins a paragraph of its own.
        end = "" if self.target.tokenizer.chat_template else "\n\n"
        return self.target.encode(
            prompt.text + end,
            prompt.answer_start,
            before=prompt.before,
            max_new_tokens=self.options.new_tokens,
        )

    def chosen(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """The first --samples of the prompts that have at most `--prompt-tokens` tokens."""
        found: list[Prompt] = []
        for prompt in prompts:
            with suppress(TargetError):  # longer than the model takes
                length = self.encode(prompt)["input_ids"].shape[1]
                found += [prompt] * (length <= self.options.prompt_tokens)
            if len(found) == self.options.samples:
                break
        return found

    def prompts(
        self,
        own: Mapping[str, Iterable[Prompt]],
        families: Mapping[str, Sequence[str]],
        ending: str = "",
    ) -> dict[str, list[Prompt]]:
        """The prompts of each task, as `chosen`: its `own` or, with --data, those of its recorded
        families. `ending` is put after each."""
        if (folder := self.options.data) is not None:
            own = {
                task: [each for name in names for each in recorded(folder, name)]
                for task, names in families.items()
            }
        return {
            task: self.chosen(each._replace(text=each.text + ending) for each in prompts)
            for task, prompts in own.items()
        }

    def measure(
        self,
        modes: Sequence[Mode],
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        title: str,
    ) -> dict[str, Measured]:
        """Every mode on every prompt. When sampling, each answer to it has another seed.

        Prompts are left out to which one of the modes says too little to be timed.
        """
        if not prompts:
            raise SystemExit(
                f"no prompt for {title} has at most {self.options.prompt_tokens} tokens: "
                "give more with --prompt-tokens"
            )
        inputs = [self.encode(prompt) for prompt in prompts]
        answers: dict[str, list[list[Answer]]] = {
            mode.name: [[] for _ in prompts] for mode in modes
        }
        forwards: dict[str, list[float]] = {mode.name: [] for mode in modes}
        repeats = self.options.repeats
        cold = [mode for mode in modes if mode.name not in self._warm]
        with progress(len(cold) + len(modes) * repeats * len(prompts)) as advance:
            for mode in cold:  # what runs first also sets up memory and kernels
                self._run(mode, inputs[0], seed=0, temperature=temperature)
                self._warm.add(mode.name)
                advance(f"{title}: {mode.name}", 1)
            for repeat in range(repeats):
                for place, sample in enumerate(inputs):
                    start = (repeat + place) % len(modes)
                    for mode in [*modes[start:], *modes[:start]]:
                        seed = repeat * len(prompts) + place
                        run, took = self._run(mode, sample, seed=seed, temperature=temperature)
                        forwards[mode.name] += took
                        answers[mode.name][place].append(run)
                        advance(f"{title}: {mode.name}", 1)
        timed = [
            place
            for place in range(len(prompts))
            if not any(run.seconds is None for each in answers.values() for run in each[place])
        ]
        if short := len(prompts) - len(timed):
            print(f"{title}: {short} of {len(prompts)} answers are too short to time, left out")
        if not timed:
            raise SystemExit(f"{title}: no answer is long enough to be timed")
        return {
            name: Measured([each[place] for place in timed], forwards[name])
            for name, each in answers.items()
        }

    def compare(
        self, modes: Sequence[Mode], kinds: Mapping[str, tuple[Sequence[Prompt], float]]
    ) -> list[Row]:
        """A row for each kind of answers.

        Args:
            modes: The first is plain decoding.
            kinds: Prompts and temperature. Where that is 0, prints how many outputs differ.
        """
        rows: list[Row] = []
        for kind, (prompts, temperature) in kinds.items():
            found = self.measure(modes, prompts, temperature=temperature, title=kind)
            figures = {name: own.beside(found[PLAIN]) for name, own in found.items()}
            count = len(found[PLAIN].answers)
            rows.append({"kind": kind, "temperature": temperature, "answers": count, **figures})
        greedy = [row for row in rows if row["temperature"] == 0]
        for mode in modes[1:] if greedy else ():
            differing = sum(row[mode.name]["differs"] for row in greedy)
            print(f"{mode.name}: {differing} greedy answers are not the plain ones")
        return rows

    def answer(self, prompt: Prompt) -> str:
        """What the target says by itself, greedily."""
        run, _ = self._run(Mode(PLAIN), self.encode(prompt), seed=0, temperature=0.0)
        text: str = self.target.tokenizer.decode(run.tokens, skip_special_tokens=True)
        return text

    def _run(
        self, mode: Mode, inputs: Any, *, seed: int, temperature: float
    ) -> tuple[Answer, list[float]]:
        """The answer, and the seconds of the target's forwards after the prompt's."""
        model = mode.model or self.model
        first, began, prompts_forwards = 0, 0.0, 0

        def begin(tokens: list[int]) -> None:
            nonlocal first, began, prompts_forwards
            if first == 0:
                first, began = len(tokens), time.perf_counter()
                prompts_forwards = len(forwards)

        options: Row = {
            **inputs,
            **greedy_options(model),
            "max_new_tokens": self.options.new_tokens,
            "streamer": Streamer(begin),
            **mode.options,
        }
        if temperature > 0:
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        output: Any = None
        with torch.inference_mode(), timed_forwards(self.model, self._now) as forwards:
            if mode.drafter is None:
                sequences = model.generate(**options)
            else:
                output = hf.generate(model, drafter=mode.drafter, seed=seed, **options)
                sequences = output.sequences
        # Reading the tokens waits for the device.
        tokens = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        later = len(tokens) - first
        seconds = (time.perf_counter() - began) / later if later else None
        drafted = (None, []) if output is None else (output.stats, output.assistants or [])
        took = forwards[prompts_forwards:]
        return Answer(tokens, seconds, *drafted), took

    def _now(self) -> float:
        """The clock, when what the device was given before is done."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def finish(self, results: Row, differences: str) -> None:
        """Prints what differs from the paper, settings and machine, and writes JSON if asked to."""
        options = self.options
        kept = ("samples", "new_tokens", "repeats", "temperature", "data")
        print(f"\n{differences}\n")
        about = harness.about(
            settings=", ".join(f"{key} {vars(options)[key]}" for key in kept if key in options),
            target=f"{self.target.name}, {self.model.dtype}, on {self.model.device}",
            threads=torch.get_num_threads(),
        )
        harness.finish(options, {**about, **results})


@contextmanager
def timed_forwards(model: Any, clock: Callable[[], float]) -> Iterator[list[float]]:
    """A list that takes the seconds of each forward of a model, by a clock's readings."""
    seconds: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: seconds.append(-clock())),
        model.register_forward_hook(lambda *_: seconds.append(seconds.pop() + clock())),
    ]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def options_of(
    description: str | None, *, samples: int = 2, new_tokens: int = 32, repeats: int = 3
) -> argparse.ArgumentParser:
    """A parser with the options that all reproductions have, with these defaults."""
    parser = harness.parser(description)
    add = parser.add_argument
    add("--target", metavar="MODEL", help="by path or name; the demo model by default")
    add("--device", help="such as cuda:0; a GPU where there is one")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--data", type=Path, metavar="FOLDER", help="recorded requests in place of the built-in")
    add("--samples", type=_positive, default=samples, help="answers of each kind")
    add("--new-tokens", type=_positive, default=new_tokens, help="of an answer, at most")
    add("--repeats", type=_positive, default=repeats, help="of every answer in every mode")
    add("--prompt-tokens", type=_positive, default=1024, help="of a prompt, at most")
    return parser


def short(name: str) -> str:
    """A model's name without the folders or the organisation that it is in."""
    return Path(name).name


def constant(model: Any, gamma: int) -> AssistantModel:
    """Drafts `gamma` tokens in every step, with the model alone."""
    return AssistantModel(model, schedule="constant", num_tokens=gamma, lookup=None)


def records(folder: Path, family: str) -> Iterator[Row]:
    """The recorded requests of a family."""
    try:
        file = family_files([folder]).get(family)
    except RecordError as error:
        raise SystemExit(str(error)) from error
    if file is None:
        raise SystemExit(f"--data must hold {family}.jsonl, got {folder}")
    return (line.value for line in parse_lines(file))


def recorded(folder: Path, family: str) -> list[Prompt]:
    """The recorded first questions of a family, shuffled."""
    every = (turns(record["prompt"]) for record in records(folder, family))
    prompts = [Prompt(said[0]) for said in every if len(said) == 1]
    random.Random(0).shuffle(prompts)
    return prompts


_MARKS = re.compile(r"<\|(?:user|assistant)\|>\n|(?:\s|</s>)(?:USER|ASSISTANT): ?")


def turns(prompt: str) -> list[str]:
    """What user and model said in a recorded prompt, without the marks of other models' templates.

    The first piece is the user's, and so is the last.
    """
    before, *said = _MARKS.split(prompt)
    return [words.strip() for words in said[: len(said) - 1 + len(said) % 2]] or [before]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _load(name: str | None, device: str | None, dtype: str) -> Target:
    try:
        return load_target(name, device=device, dtype=dtype)
    except FastdraftError as error:
        raise SystemExit(str(error)) from error


def _cut(model: Any, name: str) -> Any:
    """The draft model that `cut:N` names: the target's first layers, with its embedding, last norm
    and head; weights are shared."""
    count = model.config.get_text_config().num_hidden_layers
    number = name.removeprefix("cut:")
    if not number.isdecimal() or not 1 <= (layers := int(number)) <= count:
        raise SystemExit(f"cut:N takes from 1 to {count} layers of the target, got {name!r}")
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
