"""Speculative decoding for Hugging Face models: `generate`, or `speculate` inside transformers."""

from __future__ import annotations

from fastdraft.hf.generate import SpeculativeOutput, generate, speculate

__all__ = ["SpeculativeOutput", "generate", "speculate"]
