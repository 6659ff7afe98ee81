"""Log-probabilities of emitted tokens: those of a forward over the text, whatever was drafted."""

from __future__ import annotations

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
    """For each row the log-probabilities of its new tokens: as sampled, and raw."""
    found = []
    for row, shown, own in zip(output.sequences, mask.bool(), output.logprobs, strict=True):
        padding, columns = int((~shown).sum()), len(shown)
        tokens = row[columns : columns + len(own)]
        text = row[padding : columns + len(own)][None]
        with torch.no_grad():
            logits = model(text).logits[0, columns - padding - 1 : -1]
        scores = torch.cat(
            [
                processors(row[None, : columns + step], each[None].clone())
                for step, each in enumerate(logits)
            ]
        )
        found.append(
            tuple(
                each.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for each in (scores, logits)
            )
        )
    return found


@pytest.mark.parametrize("kind", ["silent", "chains", "trees", "model"])
@pytest.mark.parametrize("shaping", ["nothing", "positions", "path"])
@pytest.mark.parametrize("sampled", [False, True])
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
        "seed": 4,
        **(SAMPLE if sampled else {"do_sample": False}),
    }
    plain = hf.generate(model, **inputs, **options, eos_token_id=None, drafter=Silent())
    options["eos_token_id"] = int(plain.sequences[1, 30 + NEW // 2])
    drafters: dict[str, Any] = {
        "silent": Silent(),
        "chains": Generous(),
        "trees": Generous(DraftConfig(tree_budget=16)),
        "model": AssistantModel(bent(model), schedule="constant"),
    }
    prediction = None if kind == "model" else [edited(row[30:]) for row in plain.sequences]
    output = hf.generate(model, **inputs, **options, drafter=drafters[kind], prediction=prediction)
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
    for own, raw, (of_scores, of_logits) in zip(
        output.logprobs, output.raw_logprobs, expected, strict=True
    ):
        assert own.dtype == raw.dtype == torch.float32
        torch.testing.assert_close(own, of_scores, rtol=0, atol=2e-5)
        torch.testing.assert_close(raw, of_logits, rtol=0, atol=2e-5)


def test_they_change_no_token_and_are_left_out_unasked(model: Any) -> None:
    inputs = repetitive_batch(ROWS)
    options: dict[str, Any] = {"max_new_tokens": NEW, **SAMPLE, "seed": 1}
    plain = hf.generate(model, **inputs, **options)
    assert plain.logprobs is None and plain.raw_logprobs is None
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
