"""Speculative decoding for Hugging Face models: `generate`, or `speculate` inside transformers."""

from __future__ import annotations

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fastdraft.hf needs {error.name}, which is not installed: pip install 'fastdraft[hf]'",
        name=error.name,
    ) from error

from fastdraft.versions import explaining_version_errors

with explaining_version_errors():
    from fastdraft.hf.generate import generate, speculate
    from fastdraft.hf.output import SpeculativeOutput

__all__ = ["SpeculativeOutput", "generate", "speculate"]
