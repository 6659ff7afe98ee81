"""Scores, logits and log-probabilities of emitted tokens: those of a forward over the text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from assistants import bent
from fastdraft import DraftConfig, hf
from fastdraft.drafters import AssistantModel
from fastdraft.errors import InvalidValueError
from hf_models import Generous, Silent, edited, repetitive_batch

NEW = 20
ROWS = 3
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
WARPERS = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9))


class _Counting(LogitsProcessor):
    """Unknown to fastdraft, so it is called along the accepted path."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.001 * input_ids.shape[1] * torch.arange(scores.shape[1]).cos()


def _of_forward(
    model: Any, output: Any, mask: torch.Tensor, processors: LogitsProcessorList
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each row the scores and logits (tokens, vocabulary) that its tokens were chosen from."""
    found = []
    for row, shown, own in zip(output.sequences, mask.bool(), output.logprobs, strict=True):
        padding, columns = int((~shown).sum()), len(shown)
        text = row[padding : columns + len(own)][None]
        with torch.no_grad():
            logits = model(text).logits[0, columns - padding - 1 : -1]
        scores = torch.cat(
            [
                processors(row[None, : columns + step], each[None].clone())
                for step, each in enumerate(logits)
            ]
        )
        found.append((scores, logits))
    return found


def _assert_kept(
    kept: tuple[torch.Tensor, ...], counts: list[int], expected: list[torch.Tensor]
) -> None:
    """`expected`: of each row (tokens or more, vocabulary)."""
    assert {each.dtype for each in kept} == {torch.float32}
    for line, count, of_row in zip(torch.stack(kept, 1), counts, expected, strict=True):
        torch.testing.assert_close(line[:count], of_row[:count], rtol=1e-4, atol=1e-4)
        assert not line[count:].any()


@pytest.mark.parametrize(
    ("kind", "shaping", "sampled"),
    [
        ("silent", "nothing", False),
        ("silent", "path", True),
        ("static", "positions", False),
        ("static", "nothing", True),
        *itertools.product(
            ["chains", "trees", "model"], ["nothing", "positions", "path"], [False, True]
        ),
    ],
)
def test_they_are_those_of_a_forward(model: Any, kind: str, shaping: str, sampled: bool) -> None:
    """Ragged rows, one of which ends early."""
    inputs = repetitive_batch(ROWS)
    processors = LogitsProcessorList()
    if shaping == "positions":
        processors.append(RepetitionPenaltyLogitsProcessor(1.1))
    elif shaping == "path":
        processors.append(_Counting())
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "logits_processor": processors,
        "logprobs": True,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "seed": 4,
        **(SAMPLE if sampled else {"do_sample": False}),
    }
    plain = hf.generate(model, **inputs, **options, eos_token_id=None, drafter=Silent())
    options["eos_token_id"] = int(plain.sequences[1, 30 + NEW // 2])
    drafters: dict[str, Any] = {
        "silent": Silent(),
        "chains": Generous(),
        "static": Generous(),
        "trees": Generous(DraftConfig(tree_budget=16)),
        "model": AssistantModel(bent(model), schedule="constant"),
    }
    prediction = None if kind == "model" else [edited(row[30:]) for row in plain.sequences]
    more = {"drafter": drafters[kind], "prediction": prediction}
    cache = "static" if kind == "static" else None
    output = hf.generate(model, **inputs, **options, **more, cache_implementation=cache)
    assert (output.stats.accepted > 0) == (kind != "silent")
    lengths = [len(each) for each in output.logprobs]
    assert lengths == [stats.emitted for stats in output.row_stats]
    if not (sampled and kind == "model"):  # whose samples are others
        assert min(lengths) < NEW
    expected = _of_forward(
        model,
        output,
        inputs["attention_mask"],
        LogitsProcessorList([*processors, *(WARPERS if sampled else ())]),
    )
    for of_rows, kept, name in zip(
        zip(*expected, strict=True),
        (output.scores, output.logits),
        ("logprobs", "raw_logprobs"),
        strict=True,
    ):
        _assert_kept(kept, lengths, of_rows)
        for row, of_row, own in zip(output.sequences, of_rows, getattr(output, name), strict=True):
            assert own.dtype == torch.float32
            chosen = of_row.log_softmax(-1).gather(1, row[30 : 30 + len(own), None])[:, 0]
            torch.testing.assert_close(own, chosen, rtol=0, atol=2e-5)
    if not sampled:
        for name in ("drafter", "logprobs", "seed"):
            options.pop(name, None)
        plain = model.generate(**inputs, **options)
        for name in ("scores", "logits"):
            _assert_kept(output[name], lengths, list(torch.stack(plain[name], 1)))


def test_they_change_no_token_and_are_left_out_unasked(model: Any) -> None:
    inputs = repetitive_batch(ROWS)
    options: dict[str, Any] = {"max_new_tokens": NEW, **SAMPLE, "seed": 1}
    plain = hf.generate(model, **inputs, **options)
    for name in ("logprobs", "raw_logprobs", "scores", "logits"):
        assert getattr(plain, name) is None
    output = hf.generate(model, **inputs, **options, logprobs=True)
    assert torch.equal(output.sequences, plain.sequences)


def test_custom_generate_gives_them_in_a_dict(model: Any) -> None:
    inputs = repetitive_batch(1)
    call: dict[str, Any] = {"custom_generate": hf.speculate(logprobs=True), "max_new_tokens": 4}
    output = model.generate(**inputs, **call, return_dict_in_generate=True)
    [logprobs] = output.logprobs
    assert logprobs.shape == (4,)
    with pytest.raises(InvalidValueError, match="return_dict_in_generate must be True"):
        model.generate(**inputs, **call)
