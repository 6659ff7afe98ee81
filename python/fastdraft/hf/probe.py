"""What a model's forwards can verify, asked of the model itself.

Whether a forward over several tokens continues a text as forwards over one do, whether rows of
unequal length do not disturb each other, and whether a tree's branches see themselves alone: all
this depends on the model's code, its configuration and its cache. So a short text is decoded twice,
plainly and by the decoding loop with drafts that are known, some of them wrong, and the logits are
compared. Each answer is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from fastdraft import DraftStats
from fastdraft.errors import FastdraftError
from fastdraft.hf.vocabulary import vocabulary_size

__all__ = ["Question", "ask"]

# Tokens of the prompts, of which the second is padded, and new tokens.
_PROMPTS: Final = (6, 4)
_NEW: Final = 10
# What each row drafts in its steps: how many right tokens, and whether a wrong one follows. Both
# rows accept and reject, at different steps, and one drafts nothing for a while.
_DRAFTS: Final = (
    ((2, True), (0, True), (3, False)),
    ((0, True), (2, False), (0, False)),
)
# Rounding of logits relative to the largest: what needs no excuse, and what nothing excuses. Many
# models compute some of their layers in float32, whatever their own type.
_ROUNDING: Final = 8
_ROUNDING_OF_PARTS: Final = 64 * torch.finfo(torch.float32).eps
_MOST_ROUNDING: Final = 4096
_LARGEST: Final = 1 / 8
# Forwards over several tokens may round otherwise by more than a whole text differs from its parts.
_SLACK: Final = 8


@dataclass(frozen=True)
class Question:
    """What is asked of a model.

    Attributes:
        rows: 1 or 2 rows. Of two, one is shorter, and they accept different numbers of tokens.
        trees: Whether some drafts are trees.
    """

    rows: int = 1
    trees: bool = False

    def __str__(self) -> str:
        what = "a tree's tokens" if self.trees else "several tokens"
        return what + (" in rows of unequal length" if self.rows > 1 else "") + " in one forward"


@dataclass
class _Scripted:
    """Drafts what comes and what does not, as `_DRAFTS` says. A `Drafter`."""

    truths: Sequence[Sequence[int]]
    others: Sequence[int]
    trees: bool
    weighs_cost: bool = False
    _emitted: dict[int, int] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)

    def add_request(self, prompt_ids: Any, **_: Any) -> int:
        request = len(self._emitted)
        self._emitted[request] = self._steps[request] = 0
        return request

    def propose_batch(self, requests: Sequence[int], *, limits: Any, **_: Any) -> Any:
        drafts = [self._draft(request, int(limits[row])) for row, request in enumerate(requests)]
        tokens = [token for own, _ in drafts for token in own]
        parents = [parent for _, own in drafts for parent in own]
        return SimpleNamespace(
            token_ids=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            probabilities=np.full(len(tokens), 0.5, np.float32),
            offsets=np.cumsum([0, *(len(own) for own, _ in drafts)], dtype=np.int32),
        )

    def _draft(self, request: int, limit: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of a row's draft."""
        step = self._steps[request]
        self._steps[request] += 1
        right, is_wrong = _DRAFTS[request][step] if step < len(_DRAFTS[request]) else (0, False)
        truth = self.truths[request][self._emitted[request] :]
        tokens = list(truth[: min(right, limit)])
        parents = list(range(-1, len(tokens) - 1))
        if is_wrong and len(tokens) < min(limit, len(truth)):
            wrong = next(each for each in self.others if each != truth[len(tokens)])
            tokens.append(wrong)
            parents.append(len(parents) - 1)
            if self.trees and right and len(tokens) < limit:
                # The wrong token stands before the right ones, which then have to move.
                tokens = [tokens[-1], *tokens[:-1]]
                parents = [-1, -1, *range(1, len(tokens) - 1)]
        return tokens, parents

    def observe_batch(self, requests: Sequence[int], emitted_ids: Any, offsets: Any) -> None:
        for request, count in zip(requests, np.diff(offsets).tolist(), strict=True):
            self._emitted[request] += count

    def finish(self, request: int) -> DraftStats:
        return DraftStats()

    def cancel(self, request: int) -> None:
        pass


_answers: dict[Any, str | None] = {}
_asking = threading.local()


def ask(model: Any, question: Question, *, cache: str, decode: Callable[..., Any]) -> str | None:
    """What is wrong with the model's answer, in words; `None` for nothing.

    Asked once a process for each class, configuration and kind of cache. A model in training mode
    is not asked, since dropout may change what it says.

    Args:
        cache: The kind of the generation's cache.
        decode: Decodes as `model.generate`, with a drafter as its first argument.
    """
    if getattr(_asking, "now", False) or model.training:
        return None
    config = model.config
    key = (type(model), config.to_json_string(), config._attn_implementation, cache, question)
    if key not in _answers:
        _asking.now = True
        try:
            _answers[key] = _asked(model, question, decode)
        finally:
            _asking.now = False
    return _answers[key]


def _asked(model: Any, question: Question, decode: Callable[..., Any]) -> str | None:
    usual = _usual_tokens(model)
    if len(usual) < 2 * max(_PROMPTS):
        return None
    pad = getattr(model.generation_config, "pad_token_id", None) or 0
    shape = question.rows, _PROMPTS[0]
    inputs = {
        "input_ids": torch.full(shape, pad, device=model.device),
        "attention_mask": torch.zeros(shape, dtype=torch.int64, device=model.device),
    }
    for row, count in enumerate(_PROMPTS[: question.rows]):
        ids = torch.tensor([usual[(5 * at + row) % len(usual)] for at in range(count)])
        inputs["input_ids"][row, -count:] = ids.to(model.device)
        inputs["attention_mask"][row, -count:] = 1
    options = {
        "max_new_tokens": _NEW,
        "do_sample": False,
        "pad_token_id": pad,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = type(model).generate(model, **inputs, **options)
    if any(logits.isnan().any() for logits in plain.logits):
        return None  # nothing can be compared
    expected = plain.sequences[:, shape[1] :].tolist()
    drafter = _Scripted(expected, usual, question.trees)
    try:
        ours = decode(drafter, **inputs, **options)
    except FastdraftError:
        raise
    except Exception as raised:
        return f"{question} must be what its code takes, got {raised!r}"
    errors, largest = [], 0.0
    for row, tokens in enumerate(expected):
        said = ours.sequences[row, shape[1] :].tolist()
        # Behind a token that differs, the logits are of other texts.
        equal = next((at for at in range(len(said)) if said[at] != tokens[at]), len(said) - 1)
        pairs = [
            (plain.logits[at][row].float(), ours.logits[at][row].float())
            for at in range(1, equal + 1)
        ]
        sizes = (_difference(each, torch.zeros_like(each)) for each, _ in pairs)
        largest = max([largest, *sizes])
        # Not the largest: a mixture's choice of experts may turn on rounding at one token.
        errors.append(float(np.median([_difference(*pair) for pair in pairs])) if pairs else np.inf)
    error = max(errors)
    allowed = largest * max(_ROUNDING * torch.finfo(model.dtype).eps, _ROUNDING_OF_PARTS)
    if error > allowed:
        allowed = max(allowed, _allowed(model, plain.sequences[:1], plain.logits, largest))
    if error <= allowed:
        return None
    return (
        f"{question} must have the logits of plain decoding, got differences of {error:.1e} where "
        f"rounding makes {allowed:.1e}"
    )


def _allowed(model: Any, text: torch.Tensor, logits: Any, largest: float) -> float:
    """Which difference of logits rounding may make: by how much the logits of a whole text differ
    from those of its tokens one by one."""
    with torch.no_grad():
        whole = model(text).logits[0, -1 - _NEW : -1].float()
    apart = [_difference(each, one[0].float()) for each, one in zip(whole, logits, strict=True)]
    eps = torch.finfo(model.dtype).eps
    most = largest * min(_MOST_ROUNDING * eps, _LARGEST)
    return min(_SLACK * float(np.median(apart)), most)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    both = one.isfinite() & other.isfinite()
    return float((one - other)[both].abs().max()) if bool(both.any()) else 0.0


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
