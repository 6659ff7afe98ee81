"""Draft models in one generation: their caches, their drafts, and the engine beside them."""
