"""transformers' own callers of `generate`: pipelines, and folders with a `custom_generate`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, pipeline

from fastdraft import Datastore, hf
from fastdraft.errors import InvalidValueError
from hf_models import Generous, repetitive_batch, tiny_model
from tiny_tokenizer import tiny_tokenizer
from watches import Recorder, counted_forwards

pytestmark = pytest.mark.slow

NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
PROMPTS = ["abcdefgh" * 4, "aabbcc" * 3, "ijji" * 5]
CHAT = [{"role": "user", "content": "cdcdefefcdcd"}]
CUSTOM_GENERATE = """
from fastdraft import Datastore, hf
from hf_models import Generous

engine = Generous(datastores=[Datastore(max_bytes=1 << 30)])


def generate(inputs=None, *, model, generation_config=None, tokenizer=None, **kwargs):
    prediction = getattr(generation_config, "prediction", None)  # a text
    if prediction is not None:
        prediction = tokenizer(prediction, add_special_tokens=False).input_ids
    options = {"generation_config": generation_config, "tokenizer": tokenizer, **kwargs}
    output = hf.generate(model, inputs, drafter=engine, prediction=prediction, **options)
    return output.sequences
"""
PREFILLED = [*CHAT, {"role": "assistant", "content": "efef"}]


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def code_from_folders_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports a folder's code from a copy, by default in the user's home."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (PROMPTS, {}),
        (PROMPTS, {"batch_size": 2, "return_full_text": False}),
        (PROMPTS[1], {"return_tensors": True}),
        (PROMPTS[1], {"return_dict_in_generate": True}),
        (PROMPTS[0], {"generation_config": GenerationConfig(repetition_penalty=1.2)}),
        (PROMPTS[2], {"handle_long_generation": "hole"}),
        ("", {}),
        (PREFILLED, {}),
        ([CHAT, PREFILLED, CHAT], {"batch_size": 3}),
    ],
)
def test_same_text_as_without(model: Any, tokenizer: Any, inputs: Any, options: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with counted_forwards(model) as plain:
        expected = pipe(inputs, **GREEDY, **options)
    # The next call drafts from the text of this one; a pipeline may be made with it, too.
    decode = hf.speculate(drafter=Generous(datastores=[Datastore(max_bytes=1 << 24)]))
    made = {"model": model, "tokenizer": tokenizer, "custom_generate": decode}
    assert pipeline("text-generation", **made)(inputs, **GREEDY, **options) == expected
    with counted_forwards(model) as drafted:
        assert pipe(inputs, **GREEDY, **options, custom_generate=decode) == expected
    assert len(drafted) < len(plain) / 2


def test_samples_by_the_pipelines_own_settings(model: Any, tokenizer: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 3}
    plain, drafted = (
        pipe(PROMPTS[0], **options, custom_generate=hf.speculate(drafter=drafter, seed=5))
        for drafter in (None, Generous())
    )
    assert plain == drafted
    assert len({answer["generated_text"] for answer in plain}) == 3


def test_stop_sequences_with_generate_as_the_models_method(model: Any, tokenizer: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = pipe(PROMPTS[0], **GREEDY, return_full_text=False)[0]["generated_text"]
    expected = pipe(PROMPTS[0], **GREEDY, stop_sequence=text[8:10])
    assert len(expected[0]["generated_text"]) < len(PROMPTS[0] + text)
    model.generate = functools.partial(hf.generate, model, drafter=Generous())
    assert pipe(PROMPTS[0], **GREEDY, stop_sequence=text[8:10]) == expected


def test_what_cannot_be_drafted_is_an_error(model: Any, tokenizer: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with pytest.raises(InvalidValueError, match="got beam_search"):
        pipe(PROMPTS[0], **GREEDY, num_beams=2, custom_generate=hf.speculate())
    assisted = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, assistant_model=tiny_model("qwen2")
    )
    model.generate = functools.partial(hf.generate, model)
    with pytest.raises(InvalidValueError, match="choose what drafts with drafter="):
        assisted(PROMPTS[0], **GREEDY)


@pytest.fixture
def folder(tmp_path: Path, model: Any, tokenizer: Any) -> Path:
    """A model's folder whose file decodes with fastdraft; no clock rules what it drafts."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CUSTOM_GENERATE)
    return folder


def test_a_folder_brings_its_own_generate(folder: Path, model: Any) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    inputs = repetitive_batch(1)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(loaded.generate(**inputs, **GREEDY), expected)
    with counted_forwards(loaded) as drafted:
        ids = inputs.pop("input_ids")
        assert torch.equal(loaded.generate(ids, **inputs, **GREEDY), expected)
    assert len(drafted) < NEW / 2


def test_a_server_hands_the_folders_generate_its_options(
    folder: Path, model: Any, tokenizer: Any
) -> None:
    """The keywords are those of `transformers serve`."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    inputs = repetitive_batch(1)
    plain = model.generate(**inputs, **GREEDY)
    text = tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    config = GenerationConfig(**GREEDY, stop_strings=text[20:23])
    expected = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
    assert expected.shape[1] < plain.shape[1]
    config = GenerationConfig(**GREEDY, stop_strings=text[20:23], prediction=text)
    streamer = Recorder()
    with counted_forwards(loaded) as drafted:
        actual = loaded.generate(
            **inputs, generation_config=config, tokenizer=tokenizer, streamer=streamer
        )
    assert torch.equal(actual, expected)
    assert len(drafted) < expected.shape[1] - inputs["input_ids"].shape[1]
    assert streamer.calls[1:-1] == [
        [token] for token in expected[0, inputs["input_ids"].shape[1] :].tolist()
    ]


def test_a_folder_may_be_named_in_the_call(folder: Path, model: Any) -> None:
    inputs = repetitive_batch(3)
    actual = model.generate(**inputs, **GREEDY, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(actual, model.generate(**inputs, **GREEDY))
