"""The likely tokens of a step's logits, from which requests learn successors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdraft import Successors
from fastdraft.errors import InvalidValueError
from fastdraft.serving.sglang.texts import RequestText

__all__ = ["Nodes"]

_LIKELIEST: Final = 8


@dataclass(slots=True)
class Nodes:
    """The used nodes of a step's trees, and what the target said of them."""

    texts: list[RequestText]
    offsets: NDArray[np.int64]  # the nodes of each text, root included
    contexts: NDArray[np.int32]  # (nodes, 2), the last two tokens at each
    lines: NDArray[np.int64]  # the line of logits of each
    likeliest: Any = None  # int32 (lines, 2 * likeliest), token ids and the bits of probabilities
    copied: Any = None  # the event of the device at which they are on the host

    def find_likeliest(self, logits: Any, width: int) -> bool:
        """Finds the likeliest tokens of logits (requests * width, vocabulary) on the device.

        Its stream copies them to the host behind what the host copies. No host synchronisation.
        """
        import torch

        from fastdraft.verification import verify_greedy

        if len(logits) % width or len(logits) <= self.lines[-1]:
            raise InvalidValueError(
                f"logits must have {width} lines for each request, one of which is "
                f"{self.lines[-1]}, got {len(logits)}"
            )
        # A verification of rows without drafts.
        found = verify_greedy(
            logits,
            torch.empty(0, dtype=torch.int32, device=logits.device),
            torch.zeros(len(logits) + 1, dtype=torch.int64, device=logits.device),
            likeliest=_LIKELIEST,
            max_draft=0,
        ).likeliest
        assert found is not None
        both = torch.cat([found.token_ids, found.probabilities.view(torch.int32)], dim=1)
        self.likeliest = both.to("cpu", non_blocking=True)
        self.copied = torch.get_device_module(both.device).Event()
        self.copied.record()
        return True

    def learn(self, vocabulary: int | None) -> None:
        """Learns them for the requests that are still there; ids from `vocabulary` on are none."""
        if self.likeliest is None:
            return
        # It is there: the host has waited for the tokens that it copied after it.
        self.copied.synchronize()
        tables = [text.successors for text in self.texts if text.successors is not None]
        offsets, contexts, lines = self.offsets, self.contexts, self.lines
        if len(tables) < len(self.texts):
            there = np.array([text.successors is not None for text in self.texts])
            counts = np.diff(offsets)
            kept = np.repeat(there, counts)
            offsets = np.append(0, np.cumsum(counts[there]))
            contexts, lines = contexts[kept], lines[kept]
        read = self.likeliest.numpy()[lines]
        token_ids = read[:, :_LIKELIEST]
        if vocabulary is not None:
            token_ids[token_ids >= vocabulary] = -1
        probabilities = read[:, _LIKELIEST:].copy().view(np.float32).clip(0, 1)
        Successors.learn_each(tables, offsets, contexts, token_ids, probabilities)
