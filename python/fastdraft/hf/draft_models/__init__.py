"""Draft models in one generation: their caches, their drafts, and the engine beside them."""

from __future__ import annotations

from fastdraft.hf.draft_models.drafter import ModelDrafter

__all__ = ["ModelDrafter"]
