"""Random models, batches, processors and drafters against `model.generate`, token for token."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import event
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from assistants import bent
from campaign.families import FAMILIES, random_model
from fastdraft import DraftConfig, hf
from fastdraft.drafters import AssistantModel, Staged
from fastdraft.errors import InvalidValueError
from fastdraft.hf.interface import CACHE
from fastdraft.verification import verify_sampled
from hf_models import (
    EOS,
    PAD,
    VOCABULARY,
    Forester,
    Generous,
    OfRows,
    Silent,
    charge_in_steps,
)
from random_cases import cases, leave_out

# The noise of scores, which are float32 in the end, relative to the largest of them.
_NOISE = {torch.float64: 1e-5, torch.float32: 1e-4}


@cases(2, first=1)
def test_any_drafter_decodes_as_generate_does(seed: int) -> None:
    """One model and one batch, decoded by several drafters."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    try:
        model = random_model(family, rng)
    except Exception as error:
        leave_out(f"not built: {family}: {_brief(error)}")
    # No clock decides; some forwards are padded to a wider one, and some steps have no drafts.
    charge_in_steps(model, rng.choice([1, 1, 4]), plain=0.05)
    inputs = _prompts(rng)
    options = _options(rng)
    if model.config._attn_implementation == "eager" and not inputs["attention_mask"].all():
        # Its least mask is -inf to a softmax in float32, which gives padding no number.
        model.float()
    try:
        tried = model.generate(
            **inputs, max_new_tokens=2, return_dict_in_generate=True, output_logits=True
        )
        assert not tried.logits[-1].isnan().any(), "not a number"
    except Exception as error:
        leave_out(f"transformers fails: {family}: {_brief(error)}")
    # Before anything else, since plain decoding of some that are refused takes minutes.
    _decoded(model, inputs, {"max_new_tokens": 1}, family, Generous)
    compare = _sampled if rng.random() < 0.25 else _greedy
    compare(rng, family, model, inputs, options)
    event(f"family {family}")


def _greedy(
    rng: random.Random, family: str, model: Any, inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    columns = inputs["input_ids"].shape[1]
    plain = model.generate(
        **inputs, **options, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    truths = [row[columns:].tolist() for row in plain.sequences]
    for name, make, prediction in _drafters(rng, model, truths):
        output = _decoded(
            model, inputs, options, family, make, prediction=prediction, do_sample=False
        )
        _compare(
            f"{family}, {name}", plain.sequences, output.sequences, columns,
            lambda row, step, token: _nearly_largest(
                plain.scores[step][row], token, _NOISE[model.dtype]
            ),
        )  # fmt: skip
        event(f"greedy, {name}")
    if len(truths) == 1:
        _second_turn(family, model, inputs, options)


def _second_turn(family: str, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    """A conversation goes on in the cache that `hf.generate` handed over."""
    options = options | {"do_sample": False, "return_dict_in_generate": True}
    first = hf.generate(model, **inputs, **options, drafter=Generous())
    text = torch.cat([first.sequences, inputs["input_ids"][:, -5:]], dim=1)
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    if text.shape[1] + options["max_new_tokens"] > 250:
        return
    expected = model.generate(**inputs, **options, output_scores=True)
    output = hf.generate(model, **inputs, **options, **{CACHE: first[CACHE]}, drafter=Generous())
    _compare(
        f"{family}, second turn", expected.sequences, output.sequences, text.shape[1],
        lambda row, step, token: _nearly_largest(
            expected.scores[step][row], token, _NOISE[model.dtype]
        ),
    )  # fmt: skip
    event("greedy, second turn")


def _sampled(
    rng: random.Random, family: str, model: Any, inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    """A token depends on its seed, its position and its logits, on no draft and no other row."""
    columns = inputs["input_ids"].shape[1]
    rows = inputs["input_ids"].shape[0]
    seeds = [rng.getrandbits(40) for _ in range(rows)]
    warpers = {
        "temperature": rng.choice([0.3, 0.7, 1.0]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1.0, 0.9]),
    }
    options = options | warpers | {"do_sample": True}
    plain = _decoded(model, inputs, options, family, Silent, seed=seeds)
    recorder = _Recorder()
    processors = LogitsProcessorList([*options.get("logits_processor", ()), recorder])

    def explains(row: int, step: int, token: int) -> bool:
        if not recorder.scores:
            # It is called along the path, before the warpers.
            recorded = options | {"logits_processor": processors}
            hf.generate(model, **inputs, **recorded, drafter=Silent(), seed=seeds)
        scores = recorder.scores[step][row : row + 1].clone()
        scores[0, token] += _NOISE[model.dtype] * _largest(scores)
        position = step + int(inputs["attention_mask"][row].sum())
        drawn = verify_sampled(
            scores,
            torch.empty(0, dtype=torch.int32),
            torch.tensor([0, 0]),
            seeds=torch.tensor([seeds[row]]),
            positions=torch.tensor([position]),
            **warpers,
        )
        return int(drawn.token_ids[0, 0]) == token

    truths = [row[columns:].tolist() for row in plain.sequences]
    assert explains(0, 0, truths[0][0]), f"{family}: not what seed and position draw"
    for name, make, prediction in _drafters(rng, model, truths, models=False):
        output = _decoded(model, inputs, options, family, make, prediction=prediction, seed=seeds)
        what = f"{family}, {name}, sampled"
        _compare(what, plain.sequences, output.sequences, columns, explains)
        event(f"sampled, {name}")


def _decoded(
    model: Any,
    inputs: dict[str, Any],
    options: dict[str, Any],
    family: str,
    drafter: Callable[[], Any],
    **others: Any,
) -> Any:
    """The output of `hf.generate`; a case that it refuses before the prompt runs is left out."""
    widths: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: widths.append(given[0].shape[1])
    )
    try:
        return hf.generate(model, **inputs, **options, **others, drafter=drafter())
    except InvalidValueError as error:
        # A model that is asked runs on short texts.
        if inputs["input_ids"].shape[1] in widths:
            raise AssertionError(f"{family}: refused after the prompt had run: {error}") from error
        leave_out(f"refused: {_brief(error)}")
    finally:
        handle.remove()


def _compare(
    what: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    columns: int,
    explains: Callable[[int, int, int], bool],
) -> None:
    """Fails at a difference that rounding does not explain."""
    ties = 0
    shared = min(expected.shape[1], actual.shape[1])
    for row in range(len(expected)):
        unequal = (expected[row, :shared] != actual[row, :shared]).nonzero()
        if len(unequal):
            column = int(unequal[0])
            token = int(actual[row, column])
            assert column >= columns and explains(row, column - columns, token), (
                f"{what}: row {row} of {len(expected)} parts at new token {column - columns}: "
                f"{expected[row, columns:].tolist()} and {actual[row, columns:].tolist()}"
            )
            ties += 1
    assert ties or expected.shape == actual.shape, f"{what}: {expected.shape}, {actual.shape}"
    event("ties", bool(ties))


def _nearly_largest(scores: torch.Tensor, token: int, noise: float) -> bool:
    return bool(scores[token] >= scores.max() - noise * _largest(scores))


def _largest(scores: torch.Tensor) -> float:
    return max(1.0, float(scores[torch.isfinite(scores)].abs().max()))


def _brief(error: Exception) -> str:
    """The first of a message, without its numbers."""
    text = " ".join(f"{type(error).__name__} {error}".split())
    return re.sub(r"\d+", "N", text.removeprefix("InvalidValueError "))[:100]


def _prompts(rng: random.Random) -> dict[str, Any]:
    """Left-padded texts of a few tokens over and over, so that there is something to draft."""
    rows = rng.choice([1, 1, 2, 4, 8, 24, 64])
    longest = rng.randint(6, 40)
    ids = torch.full((rows, longest), PAD)
    mask = torch.zeros_like(ids)
    equal = rng.random() < 0.3
    for row in range(rows):
        length = longest if equal or row == rows - 1 else rng.randint(2, longest)
        motif = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 9))]
        text = (motif * longest)[:length]
        for _ in range(rng.choice([0, 0, length // 8])):
            text[rng.randrange(length)] = rng.randrange(3, VOCABULARY)
        ids[row, longest - length :] = torch.tensor(text)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _options(rng: random.Random) -> dict[str, Any]:
    new = rng.choice([8, 40, 80, 120])
    some = [[rng.randrange(3, VOCABULARY)] for _ in range(4)]
    processors: list[dict[str, Any]] = [
        {"repetition_penalty": rng.choice([0.8, 1.3])},
        {"no_repeat_ngram_size": rng.choice([2, 3])},
        {"min_new_tokens": rng.randint(1, new - 1)},
        {"bad_words_ids": [*some[:2], some[2] + some[3]]},
        {"forced_eos_token_id": EOS},
        {"suppress_tokens": [token for (token,) in some]},
        {"sequence_bias": [[some[0], 4.0], [some[1] + some[2], -3.0]]},
        {"exponential_decay_length_penalty": (5, 1.2)},
        {"logits_processor": LogitsProcessorList([OfRows()])},
        {"eos_token_id": [EOS, *(rng.randrange(3, VOCABULARY) for _ in range(3))]},
        {"eos_token_id": None},
        {"eos_token_id": None},
        {"eos_token_id": None},
        {"prefix_allowed_tokens_fn": _allowed(rng.randint(3, 5))},
    ]
    options: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": EOS, "pad_token_id": PAD}
    for chosen in rng.sample(processors, rng.choice([0, 0, 1, 1, 2, 3])):
        options |= chosen
    if options["eos_token_id"] is None:
        options.pop("forced_eos_token_id", None)
        options.pop("exponential_decay_length_penalty", None)
    return options


class _Recorder(LogitsProcessor):
    """Keeps the scores of every step."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


def _allowed(every: int) -> Callable[[int, torch.Tensor], list[int]]:
    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return [token for token in range(VOCABULARY) if (token + row + len(text)) % every]

    return allowed


def _drafters(
    rng: random.Random, model: Any, truths: list[list[int]], *, models: bool = True
) -> list[tuple[str, Callable[[], Any], Any]]:
    """Some of the drafters that there are: a name, what makes it, and its prediction."""
    lookahead = rng.choice([1, 4, 16])
    predictions = [_edited(rng, truth) for truth in truths]
    drafters: list[tuple[str, Callable[[], Any], Any]] = [
        ("chains", lambda: Generous(DraftConfig(lookahead=lookahead)), None),
        ("chains, predictions", lambda: Generous(DraftConfig(lookahead=lookahead)), predictions),
        ("trees", lambda: Generous(_trees(rng)), None),
        ("trees, predictions", lambda: Generous(_trees(rng)), predictions),
        ("random trees", lambda: Forester(truths, seed=rng.getrandbits(32)), None),
        ("prompt lookup", lambda: DraftConfig.prompt_lookup(rng.randint(1, 4)), None),
        ("n-gram", lambda: DraftConfig.ngram(min_probability=0.1), None),
        ("predicted outputs", lambda: DraftConfig.predicted_outputs(4, 3), predictions),
    ]
    if models:
        drafters += [
            ("draft model", lambda: _assistant(rng, model), None),
            ("staged", lambda: Staged([DraftConfig(), _assistant(rng, model)]), None),
        ]
    return rng.sample(drafters, 4)


def _trees(rng: random.Random) -> DraftConfig:
    return DraftConfig(tree_budget=rng.choice([2, 8, 32]), lookahead=rng.choice([2, 16]))


def _assistant(rng: random.Random, model: Any) -> AssistantModel:
    return AssistantModel(
        bent(model, by=rng.choice([0.0, 0.05, 0.3])),
        schedule=rng.choice(["constant", "heuristic"]),
        num_tokens=rng.choice([1, 4, 9]),
        lookup=None,
    )


def _edited(rng: random.Random, truth: list[int]) -> NDArray[np.int64]:
    """A prediction with tokens replaced, deleted and inserted."""
    tokens = list(truth)
    for _ in range(len(tokens) // rng.choice([4, 9, 30])):
        at = rng.randrange(len(tokens))
        match rng.randrange(3):
            case 0:
                tokens[at] = max(3, tokens[at] - 1)
            case 1:
                del tokens[at]
            case _:
                tokens.insert(at, 5)
    return np.array(tokens, dtype=np.int64)
