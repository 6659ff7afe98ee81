"""Asks a model what its forwards can verify.

Whether a forward over several tokens continues a text as forwards over one do, whether rows of
unequal length disturb each other, whether a tree's branches see themselves alone, whether a window
hides what it should: all this depends on the model's code, its configuration and its cache. So a
short text is decoded twice, by plain decoding and by forwards over drafts that are right and wrong,
and the logits are compared. Each answer is kept.

Asked first is an excerpt of the model, all of it made of the model's own parameters: its first
layers, up to one of each kind, and a part of its head. Most models give the best answer to that, at
little cost; no other answer is believed before the whole model was asked.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fastdraft.errors import FastdraftError
from fastdraft.hf.attention import attending
from fastdraft.hf.drafts import StepDrafts
from fastdraft.hf.interface import CACHE, attention_of
from fastdraft.hf.step import CachedModel
from fastdraft.hf.vocabulary import vocabulary_size

__all__ = ["Answer", "Question", "ask"]

# Tokens of the prompts, of which the second is padded, and new tokens.
_PROMPTS: Final = (4, 3)
_NEW: Final = 7
# Tokens that a token sees in a model with windows: fewer than a prompt has.
_WINDOW: Final = 3
_WINDOWS: Final = ("sliding_window", "attention_chunk_size")
# Lines of an excerpt's head.
_LINES: Final = 256
# Rounding of logits relative to the largest: what needs no excuse, and what nothing excuses. Many
# models compute some of their layers in float32, whatever their own type.
_ROUNDING: Final = 8
_ROUNDING_OF_PARTS: Final = 64 * torch.finfo(torch.float32).eps
_MOST_ROUNDING: Final = 4096
_LARGEST: Final = 1 / 8
# The least change by tokens that should not be seen, relative to the largest logit.
_WRONG: Final = 1 / 1024
# Forwards over several tokens may round otherwise by more than a whole text differs from its parts.
_SLACK: Final = 8


@dataclass(frozen=True)
class Question:
    """A question to a model.

    Attributes:
        rows: 1, or 2 for more of unequal length.
        padded: Whether a prompt is padded.
        trees: Whether drafts may be trees.
        windowed: Whether the text is longer than a window of the model's layers.
        given: The names of what the prompt has besides text.
    """

    rows: int = 1
    padded: bool = False
    trees: bool = False
    windowed: bool = False
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            "several tokens"
            + (" in rows of unequal length" if self.rows > 1 else "")
            + (" beyond a window" if self.windowed else "")
            + (f" behind a prompt with {', '.join(self.given)}" if self.given else "")
            + " in one forward"
        )


class Answer(NamedTuple):
    """The drafts that a model can verify.

    Attributes:
        trees: Whether drafts may be trees; else they are chains.
        positions: Whether it positions tokens as it is given; else by the columns
            of the cache, padding included.
    """

    trees: bool
    positions: bool = True


_Prefill = Callable[..., tuple[CachedModel, torch.Tensor]]

_answers: dict[Any, Answer | str] = {}
_of_models: weakref.WeakKeyDictionary[Any, dict[Any, Answer | str]] = weakref.WeakKeyDictionary()
_asking = threading.local()


def ask(
    model: Any,
    question: Question,
    *,
    cache: str | None,
    prefill: _Prefill,
    device: torch.device,
    inputs: dict[str, Any] | None = None,
) -> Answer | str:
    """Asks what the model can verify; gives words for what is wrong with its logits.

    Asked once a process for each class, configuration, dtype and kind of cache, in evaluation mode.

    Args:
        cache: The `cache_implementation` of the generation.
        prefill: Runs prompts that `generate` has prepared, by an `Answer` and the arguments of a
            `custom_generate`. Gives the model with the prompts in its cache, and the logits after
            each.
        device: Where the model takes its inputs.
        inputs: The prompts for `generate`, where the question is about these.
    """
    if getattr(_asking, "now", False):
        return Answer(question.trees)
    kind = attention_of(model.config), model.dtype, _prepares(model), cache, question
    known = _of_models.setdefault(model, {})
    if kind not in known:
        key = (type(model), model.config.to_json_string(use_diff=False), *kind)
        if key not in _answers:
            _asking.now = True
            try:
                _answers[key] = _answer(model, question, cache, prefill, inputs, device)
            finally:
                _asking.now = False
        known[kind] = _answers[key]
    return known[kind]


def _prepares(model: Any) -> str | None:
    """The object that prepares its inputs instead of its class: PEFT, by what is tuned."""
    own = vars(model).get("prepare_inputs_for_generation")
    owner = getattr(own, "__self__", None)
    return own and f"{type(owner)} {getattr(owner, 'active_peft_config', own)}"


def _answer(
    model: Any,
    question: Question,
    cache: str | None,
    prefill: _Prefill,
    inputs: dict[str, Any] | None,
    device: torch.device,
) -> Answer | str:
    usual = _usual_tokens(model)
    best = Answer(question.trees)
    if len(usual) < len(_PROMPTS) * (_PROMPTS[0] + _NEW):
        return best
    if inputs is None:
        pad = getattr(model.generation_config, "pad_token_id", None) or 0
        if pad >= vocabulary_size(model):
            pad = 0  # the caller may name another one
        counts = _PROMPTS[-1:] if question.rows == 1 and question.padded else _PROMPTS
        inputs = _prompts(usual, pad, counts[: question.rows], device)
    problem: str | None = None
    for is_excerpt, answers in ((True, [best]), (False, _less_and_less(best))):
        try:
            asked = _copied(model, is_excerpt=is_excerpt, windowed=question.windowed)
            script = _Script(asked, inputs, usual, cache)
        except Exception as raised:
            problem = f"must be what its code takes, got {raised!r}"
            continue
        for answer in answers:
            try:
                problem = script.problem(prefill, answer)
            except FastdraftError:
                if not is_excerpt:
                    raise
                break
            except Exception as raised:
                problem = f"must be what its code takes, got {raised!r}"
            if problem is None:
                return answer
    return f"{question} {problem}"


def _less_and_less(best: Answer) -> list[Answer]:
    """The answer and lesser ones."""
    trees = (True, False) if best.trees else (False,)
    return [Answer(each, positions) for positions in (True, False) for each in trees]


class _Line(NamedTuple):
    """Logits of a row, and how many tokens of its text are before them."""

    row: int
    at: int
    logits: torch.Tensor


class _Script:
    """A text, what plain decoding says of it, and forwards of the same text with drafts.

    Args:
        model: A copy, whose generation configuration is replaced.
        inputs: The prompts.
        usual: Tokens for the text.
        cache: As in `ask`.
    """

    def __init__(
        self, model: Any, inputs: dict[str, Any], usual: Sequence[int], cache: str | None
    ) -> None:
        self._model, self._inputs = model, inputs
        self._rows = list(range(inputs["input_ids"].shape[0]))
        # The tokens that each row says behind its prompt, and one that it does not.
        self._text = [
            [usual[-1 - (5 * at + row) % len(usual)] for at in range(_NEW)] for row in self._rows
        ]
        self._wrong = [next(each for each in usual if each not in own) for own in self._text]
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            pad_token_id=getattr(model.generation_config, "pad_token_id", None) or 0,
            max_new_tokens=_NEW,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
        says = _Says(self._text, inputs["input_ids"].shape[1])
        self._plain = self._generate(
            logits_processor=LogitsProcessorList([says]),
            output_logits=True,
            return_dict_in_generate=True,
        )

    def _generate(self, **options: Any) -> Any:
        inputs = dict(self._inputs)
        if CACHE in inputs:
            inputs[CACHE] = copy.deepcopy(inputs[CACHE])
        return type(self._model).generate(self._model, **inputs, **options)

    def problem(self, prefill: _Prefill, answer: Answer) -> str | None:
        """Says what is wrong with the logits of forwards that need this answer."""
        steps: list[list[_Line]] = []

        def decode(model: Any, *given: Any, **kwargs: Any) -> Any:
            target, first = prefill(answer, model, *given, **kwargs)
            steps.append([_Line(row, 0, logits) for row, logits in enumerate(first)])
            with attending(model):
                steps.extend(self._drafted(target, trees=answer.trees))
            return given[0]

        self._generate(custom_generate=decode)
        plain = self._plain.logits
        if any(logits.isnan().any() for logits in plain):
            return None  # nothing can be compared
        largest, of_steps, of_rows = 0.0, [0.0], [0.0]
        for row in self._rows:
            found: list[float] = []
            for step in steps:
                pairs = [(plain[at][row], logits) for of, at, logits in step if of == row]
                sizes = (_difference(own, torch.zeros_like(own)) for own, _ in pairs)
                largest = max(largest, *sizes)
                errors = [_difference(*pair) for pair in pairs]
                found += errors
                # Not the largest: a mixture's choice of experts may turn on rounding at one token.
                of_steps.append(float(np.mean(errors)))
            of_rows.append(float(np.median(found)))
        error = max(of_rows)
        eps = torch.finfo(self._model.dtype).eps
        allowed = largest * max(_ROUNDING * eps, _ROUNDING_OF_PARTS)
        if error > allowed:
            allowed = max(allowed, self._allowed(largest))
        if error <= allowed:
            # One kind of step may be wrong where the others are right.
            error, allowed = max(of_steps), max(allowed, largest * _WRONG)
        if error <= allowed:
            return None
        return (
            f"must have the logits of plain decoding, got differences of {error:.1e} where "
            f"rounding makes {allowed:.1e}"
        )

    def _drafted(self, target: CachedModel, *, trees: bool) -> Iterator[list[_Line]]:
        """The logits of forwards over drafts.

        The first row accepts a token, the others none. In a tree a wrong token stands before the
        right one, which then has to move.
        """
        columns, rows = target.cache.get_seq_length(), self._rows
        cached = [columns for _ in rows]
        # A tree of all rows but the first one is a chain.
        nodes = [[wrong] for wrong in self._wrong]
        nodes[0].insert(1 if trees else 0, self._text[0][1])
        drafts = _chains(nodes)
        if trees:
            drafts = replace(drafts, parents=np.full_like(drafts.parents, -1))
        lines = self._forward(target, cached, columns, drafts)
        step = [_Line(row, 1, lines[row][0]) for row in rows]
        yield [*step, _Line(0, 2, lines[0][2 if trees else 1])]
        if trees:
            target.compact(rows, cached, np.array([[0, 2 - (row > 0)] for row in rows]))
        # A step behind them, whose draft is right, and one without a draft.
        cached = [columns + 1 + (row == 0) for row in rows]
        for drafted in (2, 0):
            starts = [at - columns + 1 for at in cached]
            right = [own[at : at + drafted] for own, at in zip(self._text, starts, strict=True)]
            lines = self._forward(target, cached, columns, _chains(right))
            yield [
                _Line(row, starts[row] + at, line)
                for row in rows
                for at, line in enumerate(lines[row])
            ]
            cached = [at + 1 + drafted for at in cached]

    def _forward(
        self, target: CachedModel, cached: list[int], columns: int, drafts: StepDrafts
    ) -> Sequence[torch.Tensor]:
        """The logits of each row's last token and its draft."""
        starts, wanted = target.cache.starts(cached), [1 + count for count in drafts.counts]
        texts = zip(self._text, starts, cached, drafts.tolist(), strict=True)
        tokens = [
            [*own[start - columns : end - columns + 1], *draft] for own, start, end, draft in texts
        ]
        needed = max(map(len, tokens))
        width = next(each for each in target.widths or (needed,) if each >= needed)
        logits = target.forward(
            tokens,
            width=width,
            rows=self._rows,
            cached=starts,
            wanted=None if starts is cached else wanted,
            trees=None if drafts.are_chains else drafts.sees(width),
        )
        return torch.split(logits, wanted)

    def _allowed(self, largest: float) -> float:
        """Which difference of logits rounding may make: by how much the logits of a whole text
        differ from those of its tokens one by one."""
        text = self._plain.sequences[:1]
        with torch.no_grad():
            whole = self._model(text).logits[0, -1 - _NEW : -1]
        pairs = zip(whole, self._plain.logits, strict=True)
        apart = [_difference(each, one[0]) for each, one in pairs]
        eps = torch.finfo(self._model.dtype).eps
        most = largest * min(_MOST_ROUNDING * eps, _LARGEST)
        return min(_SLACK * float(np.median(apart)), most)


class _Says(LogitsProcessor):
    """Chooses the tokens of known texts, (rows, new tokens)."""

    def __init__(self, text: Sequence[Sequence[int]], columns: int) -> None:
        self._text, self._columns = torch.tensor(text, device="cpu"), columns

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self._text[:, input_ids.shape[1] - self._columns].to(scores.device)
        chosen: torch.Tensor = torch.nn.functional.one_hot(tokens).to(scores.dtype)
        return chosen


def _chains(drafts: Sequence[Sequence[int]]) -> StepDrafts:
    """Drafts of rows."""
    return StepDrafts.of_chains(list(map(len, drafts)), [each for own in drafts for each in own])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.float(), other.float()
    both = one.isfinite() & other.isfinite()
    return float((one - other)[both].abs().max()) if bool(both.any()) else 0.0


def _prompts(
    usual: Sequence[int], pad: int, counts: Sequence[int], device: Any
) -> dict[str, torch.Tensor]:
    """Left-padded prompts of `counts` tokens, for `generate`."""
    ids = torch.full((len(counts), _PROMPTS[0]), pad, device="cpu")
    mask = torch.zeros_like(ids)
    for row, count in enumerate(counts):
        ids[row, -count:] = torch.tensor([usual[5 * at + row] for at in range(count)], device="cpu")
        mask[row, -count:] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _usual_tokens(model: Any) -> list[int]:
    """Some ids that stand for text: no ids that a configuration names."""
    named = [model.config, model.config.get_text_config(decoder=True), model.generation_config]
    special = {
        value
        for config in named
        for name, value in vars(config).items()
        if "token" in name and isinstance(value, int)
    }
    size = vocabulary_size(model)
    found = [each for each in range(3, min(size, 200)) if each not in special]
    return found[:64]


def _copied(model: Any, *, is_excerpt: bool, windowed: bool) -> Any:
    """A copy of the model's modules in evaluation mode, with the model's own parameters.

    Args:
        is_excerpt: Whether it has the first layers only, a part of the head, and no hooks.
        windowed: Whether its windows are shorter than a prompt of this module's.
    """
    old = model.config, model.config.get_text_config(decoder=True)
    configs = {}
    if windowed:
        config = copy.deepcopy(model.config)
        configs = {id(old[0]): config, id(old[1]): config.get_text_config(decoder=True)}
    layers, count = _first_layers(model) if is_excerpt else (None, 0)
    head = model.get_output_embeddings() if is_excerpt else None
    made: dict[int, Any] = {}

    def copied(module: torch.nn.Module) -> Any:
        own = made.get(id(module))
        if own is not None:
            return own
        own = made[id(module)] = object.__new__(type(module))
        state = vars(own)
        state |= vars(module)
        children = list(module._modules.items())[: count if module is layers else None]
        state |= {
            "training": False,
            "_compiled_call_impl": None,
            "_buffers": dict(module._buffers),
            "_modules": {name: each and copied(each) for name, each in children},
        }
        if is_excerpt:
            state |= {"_forward_hooks": {}, "_forward_pre_hooks": {}}
        if module is head and type(head) is torch.nn.Linear:
            step = max(1, head.out_features // _LINES)
            state["_parameters"] = {
                name: each if each is None else each.detach()[::step]
                for name, each in head._parameters.items()
            }
        for name, value in vars(module).items():
            if id(value) in configs:
                state[name] = configs[id(value)]
        if windowed:
            _narrow(state)
        return own

    for config in configs.values():
        _narrow(vars(config))
    return copied(model)


def _narrow(attributes: dict[str, Any]) -> None:
    """Makes the windows among attributes short."""
    for name in _WINDOWS:
        if type(attributes.get(name)) is int:
            attributes[name] = _WINDOW


def _first_layers(model: Any) -> tuple[Any, int]:
    """The layers, and of how many of the first ones each is of another kind than those before."""
    config = model.config.get_text_config(decoder=True)
    lists = [
        each
        for each in model.get_decoder().modules()
        if isinstance(each, torch.nn.ModuleList) and len(each) == config.num_hidden_layers
    ]
    if len(lists) != 1:
        return None, 0
    kinds = getattr(config, "layer_types", None) or [None] * len(lists[0])
    firsts: dict[Any, int] = {}
    for at, (layer, kind) in enumerate(zip(lists[0], kinds, strict=True)):
        parts = [
            (type(each), *(value for value in vars(each).values() if isinstance(value, bool)))
            for each in layer.modules()
        ]
        firsts.setdefault((kind, *parts), at)
    return lists[0], 1 + max(firsts.values())
