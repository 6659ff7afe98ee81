"""Speculative decoding for Hugging Face models: `generate`, or `speculate` inside transformers."""

from __future__ import annotations

from fastdraft.hf.generate import generate, speculate
from fastdraft.hf.output import SpeculativeOutput

__all__ = ["SpeculativeOutput", "generate", "speculate"]
