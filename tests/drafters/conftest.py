"""A target and a draft model that mostly agrees with it."""

from __future__ import annotations

from typing import Any

import pytest

from assistants import bent
from hf_models import tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def small(model: Any) -> Any:
    return bent(model)
