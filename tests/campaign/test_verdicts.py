"""The probe's answer for every family that can be built, against a full comparison in float64."""

from __future__ import annotations

import random
import zlib
from typing import Any
from unittest import mock

import torch
from hypothesis import event

from campaign.families import FAMILIES, MULTIMODAL, multimodal_model, random_model
from fastdraft import hf
from fastdraft.errors import InvalidValueError
from fastdraft.hf.plan import Plan
from fastdraft.hf.probe import Answer
from hf_models import drafting, repetitive_batch
from random_cases import cases, leave_out

ALL = [*FAMILIES, *MULTIMODAL]
_NEW = 28
_OPTIONS: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": _NEW,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}
# Relative to the largest logit: half of the tokens differ by less where a forward is right, and all
# of them by less. Recurrent states are float32 in any model.
_MEDIAN, _MOST = 1e-5, 2e-3


@cases(3)
def test_the_probe_says_what_a_full_comparison_says(seed: int) -> None:
    """One family is tried, another one for each seed."""
    family = ALL[seed % len(ALL)]
    make = multimodal_model if family in MULTIMODAL else random_model
    try:
        model = make(family, random.Random(zlib.crc32(f"{family} {seed}".encode())))
    except Exception as error:
        leave_out(f"not built: {family}: {type(error).__name__}")
    for name in ("eos_token_id", "forced_eos_token_id"):
        if hasattr(model.generation_config, name):
            setattr(model.generation_config, name, None)
    compared = 0
    for rows in (1, 3):
        inputs: dict[str, Any] = repetitive_batch(rows)
        inputs["input_ids"].clamp_(max=75)  # those above stand for images in some
        try:
            plain = model.generate(**inputs, **_OPTIONS)
            assert not any(logits.isnan().any() for logits in plain.logits), "not a number"
        except Exception as error:
            event(f"transformers fails: {family}: {type(error).__name__}")
            continue
        event(_verdict(family, model, inputs, plain))
        compared += 1
    if not compared:
        leave_out(f"transformers fails: {family}")


def _verdict(family: str, model: Any, inputs: dict[str, Any], plain: Any) -> str:
    rows = len(inputs["input_ids"])
    said: list[tuple[Answer, Answer]] = []
    answered = Plan._answered

    def watched(plan: Plan) -> Answer:
        answer = answered(plan)
        # Last of all that of the generation itself, behind those of the probe.
        has_positions = plan._model_kwargs.get("position_ids") is not None
        trees = plan._masks.needed is None and not plan._cache.has_recurrent_layers
        said.append((Answer(trees and has_positions), answer))
        return answer

    try:
        with mock.patch.object(Plan, "_answered", watched):
            hf.generate(model, **inputs, **_OPTIONS | {"max_new_tokens": _NEW})
    except InvalidValueError as error:
        refused = str(error)
    else:
        refused = ""
    if refused and "cannot verify drafts" not in refused:
        return f"refused otherwise, {rows} rows"
    if refused:
        for answer in (Answer(True), Answer(False)):
            problem = _problem(model, inputs, plain, answer)
            assert problem, f"{family}, {rows} rows: {answer} is right, but {refused}"
        return f"refused, {rows} rows"
    best, answer = said[-1]
    problem = _problem(model, inputs, plain, answer)
    assert not problem, f"{family}, {rows} rows: the probe said {answer}, {problem}"
    if answer != best:
        problem = _problem(model, inputs, plain, best)
        assert problem, f"{family}, {rows} rows: the probe said {answer}, {best} is right too"
    return f"{'trees' if answer.trees else 'chains'}, {rows} rows"


def _problem(model: Any, inputs: dict[str, Any], plain: Any, answer: Answer) -> str | None:
    """How the model's logits differ when it is decoded by this answer; None if they do not."""
    columns = inputs["input_ids"].shape[1]
    truths = plain.sequences[:, columns:]
    ours = drafting("trees" if answer.trees else "predicted", truths)
    try:
        with mock.patch.object(Plan, "_answered", return_value=answer):
            output = hf.generate(model, **inputs, **_OPTIONS, **ours)
    except Exception as error:
        return repr(error)
    for row, text in enumerate(truths.tolist()):
        spoken = output.sequences[row, columns:].tolist()
        equal = next((at for at in range(_NEW) if spoken[at] != text[at]), _NEW - 1)
        pairs = [(plain.logits[at][row], output.logits[at][row]) for at in range(equal + 1)]
        apart = torch.stack([(one - two).nan_to_num(0, 0, 0).abs().max() for one, two in pairs])
        largest = max(one[one.isfinite()].abs().max() for one, _ in pairs)
        if apart.median() > _MEDIAN * largest or apart.max() > _MOST * largest:
            return f"differs by {apart.median():.1e}, {apart.max():.1e} of {largest:.1e}"
    return None
