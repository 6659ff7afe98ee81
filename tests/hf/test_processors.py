"""Logits processors and stopping criteria of all kinds, each called as plain decoding calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from assistants import constant
from byte_tokenizer import byte_tokenizer
from fastdraft import hf
from hf_models import (
    EOS,
    VOCABULARY,
    OfRows,
    assert_decodes,
    drafting,
    repetitive_batch,
    tiny_model,
)

NEW = 32
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama").double()


def _two_thirds(row: int, text: torch.Tensor) -> list[int]:
    return [token for token in range(VOCABULARY) if (token + row + len(text)) % 3]


@pytest.mark.parametrize("drafts", ["predicted", "trees"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 20},
        {"bad_words_ids": [[5], [7, 9], [11, 12, 13]]},
        {"forced_eos_token_id": EOS},
        {"suppress_tokens": [4, 5, 6], "repetition_penalty": 0.8},
        {"eos_token_id": [EOS, 17, 23, 60, 61, 62]},
        {"sequence_bias": [[[10], 4.0], [[11, 12], -3.0]], "suppress_tokens": [7]},
        {"exponential_decay_length_penalty": (5, 1.2)},
        {"logits_processor": LogitsProcessorList([OfRows()])},
        {"prefix_allowed_tokens_fn": _two_thirds},
    ],
    ids=lambda options: "-".join(options),
)
def test_processors_see_the_tokens_before_a_position(
    llama: Any, options: dict[str, Any], drafts: str
) -> None:
    inputs = repetitive_batch(3, seed=3)
    found = assert_decodes(
        llama, inputs, drafts, every=5, exact=True, **{"max_new_tokens": 48, **options}
    )
    if drafts == "trees":
        assert found.drafter.moved > 0


class _ReadsText(TemperatureLogitsWarper):
    """Does what a stock processor does, and penalises the tokens that the text ends with."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = super().__call__(input_ids, scores)
        last = input_ids[:, -5:]
        return scores.scatter_add(1, last, torch.full(last.shape, -1.5, dtype=scores.dtype))


class _Returns(LogitsProcessor):
    """Reads the text, and returns scores of a type and in a form of its own."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids[:, -1:]
        scores = scores.scatter_add(1, last, torch.full(last.shape, -1.5, dtype=scores.dtype))
        match self.form:
            case "float64":
                # The choice depends on bits that float32 does not have.
                scores = scores.double()
                best = scores.argmax(-1, keepdim=True)
                first = torch.zeros_like(best)
                return scores.scatter(1, first, scores.gather(1, best) + 1e-10 * (last % 2 - 0.5))
            case "float16":
                return scores.half()
            case "strided":
                return scores.t().contiguous().t()
        raise AssertionError(self.form)


OWN = [_ReadsText(0.7), *map(_Returns, ("float64", "float16", "strided"))]


@pytest.mark.parametrize("processor", OWN, ids=["subclass", "float64", "float16", "strided"])
def test_processors_of_ones_own(model: Any, processor: LogitsProcessor) -> None:
    """The tokens and scores are those of plain decoding, and drafts are accepted."""
    inputs = repetitive_batch(3)
    options = {
        **OPTIONS,
        "logits_processor": LogitsProcessorList([processor]),
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = model.generate(**inputs, **options)
    drafts = drafting("predicted", expected.sequences[:, 30:])
    output = hf.generate(model, **inputs, **options, **drafts)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.accepted > 0
    for ours, theirs in zip(output.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["float64", "float16"])
def test_draft_models_take_scores_of_any_type(model: Any, form: str) -> None:
    options = {**OPTIONS, "do_sample": True, "top_k": 0, "logits_processor": [_Returns(form)]}
    output = hf.generate(model, **repetitive_batch(2), **options, drafter=constant(model), seed=3)
    assert output.stats.accepted > 0


class _Trie:
    """Allows the tokens of some answers alone, and knows no other text."""

    def __init__(self, columns: int, answers: list[list[int]], end: int) -> None:
        self.columns = columns
        self.followers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row, answer in enumerate(answers):
            for length in range(len(answer) + 1):
                # After an answer's end, plain decoding asks about the padding.
                allowed = [*answer[length : length + 1], *([end] if length >= len(answer) else [])]
                other = (allowed[0] + 1) % 96 if length % 3 == 1 else allowed[0]
                self.followers[row, tuple(answer[:length])] = sorted({*allowed, other})

    def __call__(self, row: int, text: torch.Tensor) -> list[int]:
        said = tuple(text[self.columns :].tolist())
        return self.followers[row, said]


@pytest.mark.parametrize("drafts", ["predicted", "trees", "models", "sampled models"])
def test_a_trie_is_asked_about_its_own_text_alone(model: Any, drafts: str) -> None:
    inputs = repetitive_batch(3)
    options = {**OPTIONS, "max_new_tokens": 12}
    said = model.generate(**inputs, **options)[:, 30:]
    options["prefix_allowed_tokens_fn"] = _Trie(30, said.tolist(), 96)
    expected = None
    if drafts == "sampled models":
        options |= {"do_sample": True, "top_k": 0}
    else:
        expected = model.generate(**inputs, **options)
    of_models: dict[str, Any] = {"drafter": constant(model), "seed": 1}
    more = of_models if "models" in drafts else drafting(drafts, said)
    output = hf.generate(model, **inputs, **options, **more)
    assert output.stats.accepted > 0
    if expected is not None:
        assert torch.equal(output.sequences, expected)


class _Recorder(LogitsProcessor, StoppingCriteria):
    """Keeps what it is called with, and bans what the text so far has banned.

    A processor or a criterion, by the type of the second argument.
    """

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []
        self.judged: list[list[list[int]]] = []
        self.state = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        if not isinstance(scores, torch.Tensor):
            self.judged.append(input_ids.tolist())
            return torch.tensor([len(self.judged) == 20 + row for row in range(len(input_ids))])
        self.texts.append(input_ids.tolist())
        self.state = (self.state * 31 + int(input_ids[0, -1])) % 97
        scores = scores.clone()
        scores[:, self.state :: 7] -= 2.0
        return scores


@pytest.mark.parametrize("drafts", ["predicted", "trees"])
def test_what_is_not_known_is_called_as_in_plain_decoding(model: Any, drafts: str) -> None:
    """With all rows' texts, once for each length, in order; so it may remember its calls."""
    inputs = repetitive_batch(3)
    options = {**OPTIONS, "eos_token_id": 96, "pad_token_id": 0, "repetition_penalty": 1.05}
    plain, ours = _Recorder(), _Recorder()

    def with_(recorder: _Recorder) -> dict[str, Any]:
        return {
            **options,
            "logits_processor": LogitsProcessorList([recorder]),
            "stopping_criteria": StoppingCriteriaList([recorder]),
        }

    expected = model.generate(**inputs, **with_(plain))
    output = hf.generate(model, **inputs, **with_(ours), **drafting(drafts, expected[:, 30:]))
    assert torch.equal(output.sequences, expected)
    assert ours.texts == plain.texts
    assert ours.judged == plain.judged
    assert output.stats.accepted > 0


@pytest.mark.parametrize("drafts", ["predicted", "trees"])
def test_a_grammar_is_a_processor_of_ones_own(drafts: str) -> None:
    """xgrammar's matchers accept token after token, of each row its own."""
    xgrammar: Any = pytest.importorskip("xgrammar", reason="pip install xgrammar")
    tokenizer = byte_tokenizer(eos_token="<eos>")
    end = len(tokenizer) - 1
    model = tiny_model("llama", vocab_size=len(tokenizer)).double()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    grammars = [compiler.compile_regex(each) for each in ("(Oslo|Paris|Prague) [0-9]{3}", "[ab]+;")]

    def options() -> dict[str, Any]:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammars)
        return {
            "do_sample": False,
            "max_new_tokens": 24,
            "eos_token_id": end,
            "pad_token_id": end,
            "logits_processor": LogitsProcessorList([processor]),
        }

    inputs = repetitive_batch(2)
    expected = model.generate(**inputs, **options())
    output = hf.generate(model, **inputs, **options(), **drafting(drafts, expected[:, 30:]))
    assert torch.equal(output.sequences, expected)
    assert output.stats.accepted > 0
    assert tokenizer.decode(expected[0, 30:]).startswith(("Oslo", "Paris", "Prague"))


def test_guidance_runs_its_own_model_along_the_path(model: Any) -> None:
    """Classifier-free guidance keeps the cache of another forward from call to call."""
    assert_decodes(model, repetitive_batch(2), exact=True, **OPTIONS, guidance_scale=1.5)


def test_logits_are_compared_as_float32() -> None:
    """As plain decoding does, whatever the model's type: ties go to the first of the tokens."""
    model = tiny_model("llama").double()
    with torch.no_grad():
        head = model.lm_head.weight
        head[50:] = head[: len(head) - 50] * (1 + 1e-12)
    assert_decodes(model, repetitive_batch(2), "found", exact=True, **OPTIONS)


class _Every(StoppingCriteria):
    """Ends all rows at a length, in a form of its own."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        ends = input_ids.shape[1] >= 50
        return ends if self.form == "bool" else torch.tensor(ends)


@pytest.mark.parametrize(("form", "rows"), [("bool", 1), ("scalar", 3)])
def test_criteria_may_answer_for_all_rows_at_once(model: Any, form: str, rows: int) -> None:
    options = {**OPTIONS, "stopping_criteria": StoppingCriteriaList([_Every(form)])}
    if rows > 1:
        options["eos_token_id"] = 96
    found = assert_decodes(model, repetitive_batch(rows), exact=True, **options)
    assert found.expected.shape[1] == 50
