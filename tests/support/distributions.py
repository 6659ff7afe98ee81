"""Holds that sampled texts have the distribution of a model and its logits processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import LogitsProcessorList

__all__ = ["assert_distribution"]


def assert_distribution(
    model: Any, sequences: torch.Tensor, *, prompt: int, processors: list[Any]
) -> None:
    """Every sampled token, put through its conditional distribution function, is uniform.

    Tokens in the order of their probabilities, so that a verifier that favours or disfavours
    likely ones bends the distribution; each step also alone, and each pair of steps, since a fault
    could hide at the first or last position of a draft, or tie one token to the next.

    Args:
        sequences: Prompts of `prompt` tokens, and the tokens sampled behind them.
        processors: Those that shape the model's logits.
    """
    with torch.no_grad():
        logits = model(sequences).logits[:, prompt - 1 : -1]
    length, shape = logits.shape[1], LogitsProcessorList(processors)
    for step in range(length):
        logits[:, step] = shape(sequences[:, : prompt + step], logits[:, step])
    probabilities = logits.flatten(0, 1).double().softmax(-1)
    tokens = sequences[:, prompt:].flatten()
    assert bool((probabilities.gather(-1, tokens[:, None]) > 0).all())
    sorted_, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    own = sorted_.gather(-1, rank)[:, 0]
    below = (sorted_.cumsum(-1).gather(-1, rank)[:, 0] - own).numpy()
    spread = np.random.default_rng(5).random(len(below))
    uniform = (below + spread * own.numpy()).reshape(-1, length)
    counts, _ = np.histogram(uniform, bins=50, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4
    for step in range(length):
        counts, _ = np.histogram(uniform[:, step], bins=20, range=(0, 1))
        assert stats.chisquare(counts).pvalue > 1e-5
    for step in range(length - 1):
        pairs, _, _ = np.histogram2d(
            uniform[:, step], uniform[:, step + 1], bins=6, range=[(0, 1), (0, 1)]
        )
        assert stats.chisquare(pairs.flatten()).pvalue > 1e-5
