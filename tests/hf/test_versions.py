"""A transformers newer than was tested is named where its interface differs, and only there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, cache_utils, configuration_utils, modeling_utils
from transformers.generation import configuration_utils as generation_config
from transformers.generation import utils

from fastdraft import drafters, hf
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.hf import requirements
from fastdraft.hf.interface import CACHE
from fastdraft.versions import NEWEST, newer
from hf_models import repetitive_batch

pytestmark = pytest.mark.any_transformers

SENTENCE = (
    r"^fastdraft \d+\.\d+ was tested with transformers 5\.19 to {}\.{}; this is 5\.99\.1: "
    r"pip install 'transformers<{}\.{}' \(".format(*NEWEST, NEWEST[0], NEWEST[1] + 1)
)


@pytest.fixture
def untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "transformers-5.99.1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.99.1\n")
    monkeypatch.syspath_prepend(tmp_path)


def generate(model: Any, **options: Any) -> Any:
    return hf.generate(model, **repetitive_batch(1), max_new_tokens=4, **options)


def test_this_version_was_tested() -> None:
    assert newer() is None


@pytest.mark.usefixtures("untested")
def test_a_newer_version_that_works_is_not_named(model: Any) -> None:
    assert generate(model).sequences.shape[1] > repetitive_batch(1)["input_ids"].shape[1]


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("part", ["_prefill", "_optimize_model_for_decode"])
def test_what_is_missing_is_named(model: Any, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.delattr(GenerationMixin, part)
    with pytest.raises(FastdraftError, match=SENTENCE + "AttributeError: .*" + part):
        generate(model)


@pytest.mark.usefixtures("untested")
def test_a_cache_of_another_name_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "CACHE", CACHE + "_renamed")
    with pytest.raises(InvalidValueError, match=SENTENCE + "model must take a key-value cache"):
        generate(model)


def test_a_tested_version_is_never_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GenerationMixin, "_prefill")
    with pytest.raises(AttributeError, match="_prefill"):
        generate(model)


@pytest.mark.usefixtures("untested")
def test_errors_of_the_callers_own_pass(model: Any) -> None:
    def stop(*_: Any) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        generate(model, stopping_criteria=[stop])
    with pytest.raises(InvalidValueError, match=r"^fastdraft needs a key-value cache"):
        generate(model, use_cache=False)


def test_private_names_are_in_one_module() -> None:
    modules = cache_utils, configuration_utils, generation_config, modeling_utils, utils
    theirs = set(re.findall(r"\b_[a-z]\w+", "".join(map(inspect.getsource, modules))))
    theirs -= {*dir(torch), *dir(torch.nn.Module()), *dir(torch.Tensor)}
    used: dict[str, set[str]] = {}
    for room in (hf, drafters):
        for path in Path(room.__file__).parent.rglob("*.py"):
            text = path.read_text("utf-8")
            names = set(re.findall(r"(?<!self)(?<!cls)[.\"](_[a-z]\w+)", text))
            if found := names & theirs:
                used[path.name] = found
    assert len(used.pop("interface.py")) <= 8
    assert used == {}
