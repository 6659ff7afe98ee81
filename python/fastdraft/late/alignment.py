"""Drafts on the device for hosts that wait for nothing: late continuations, aligned with the text.

A host that keeps its device busy computes drafts one or two steps late, on another thread. What it
computes are *continuations*: for each request a tree of what may follow its text. An `Aligner` then
drafts on the device: it finds the text as it is now in the tree, and goes on from there. Where the
tree does not help, it drafts from the longest repetition in the request's own text, or takes the
last token for an edit. Drafts may be wrong, as ever; verification decides.

On a CUDA or ROCm device nothing here waits, allocates memory after the first call, or reads a value
back, so a call may be captured in a CUDA graph. Elsewhere, and without Triton, values are read.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels.align import align
from fastdraft.kernels.operands import (
    Aligned,
    Alignment,
    Head,
    Scan,
    Texts,
    Trees,
    width_beside_head,
)
from fastdraft.verification.checks import INTEGER_TYPES, check_tensor

__all__ = ["Aligned", "Aligner", "Head", "Texts", "Trees", "width_beside_head"]

_PROBABILITIES: Final = (
    *(0.05, 0.23, 0.47, 0.57, 0.64, 0.69, 0.70, 0.72, 0.73),
    *(0.77, 0.79, 0.80, 0.83, 0.84, 0.84, 0.85, 0.90),
)
"""The probability of the next token after a repetition of 0 (an edit), 1, 2, ... tokens: the mean
of recorded requests of many kinds."""
_WINDOW: Final = 4096
"""How many positions before the text's last are looked at for a repetition."""


class Aligner:
    """Makes the drafts of a batch on one device. Not for several streams at once.

    Args:
        device: that of all operands.
        max_rows: the most rows of a batch.
        lookahead: the longest draft.
        vocabulary: the target's tokens; a draft ends before the first one outside.
        tail: how many of each text's last tokens `Aligned.ends` has.
        beside_head: whether calls have a `Head`, whose drafts are taken where they are better.

    Raises:
        InvalidValueError: a value is out of its range.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_rows: int,
        lookahead: int,
        vocabulary: int,
        tail: int = 1,
        beside_head: bool = False,
    ) -> None:
        for name, value, most in (
            ("max_rows", max_rows, 1 << 20),
            ("lookahead", lookahead, 511),
            ("vocabulary", vocabulary, 1 << 31),
            ("tail", tail, 1 << 10),
        ):
            if not 1 <= value <= most:
                raise InvalidValueError(f"{name} must be from 1 to {most}, got {value}")
        self._vocabulary = vocabulary
        probabilities = torch.tensor(_PROBABILITIES, dtype=torch.float32, device=device)
        # The most that two steps emit.
        reach = 2 * (lookahead + 1)
        self._scan = Scan(probabilities, shortest=1, window=_WINDOW, reach=reach)
        self._beside_head = beside_head
        width = 3 + (width_beside_head(lookahead) if beside_head else 0) + tail
        self._output = Aligned(
            torch.zeros(max_rows, lookahead, dtype=torch.int64, device=device),
            torch.zeros(max_rows, lookahead, dtype=torch.float32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
            torch.zeros(max_rows, width, dtype=torch.int32, device=device),
        )

    @property
    def output(self) -> Aligned:
        """The memory that all calls write to, of `max_rows` rows."""
        return self._output

    @torch.no_grad()
    def align(
        self,
        texts: Texts,
        trees: Trees,
        idx_mapping: Tensor,
        num_sampled: Tensor,
        head: Head | None = None,
    ) -> Aligned:
        """The drafts of a batch, in memory that the next call writes to. One launch.

        Args:
            texts: The texts as they are now, of all the host's requests.
            trees: The newest continuations that have arrived, in the same slots.
            idx_mapping: integer (rows,), the slot of each row of the batch. A row whose slot is
                outside gets no draft.
            num_sampled: integer (rows,), how many tokens each row has just emitted. A row with none
                gets no draft: it is still at its prompt.
            head: With `beside_head`, the head's drafts: a row takes the better of the two.

        Raises:
            InvalidValueError: An operand has a wrong type, shape or device. Values are not looked
                at; drafts are tokens of the vocabulary, or padding, the text's last token.

        O(rows * (nodes * (reach + lookahead) + window * longest repetition)) at the worst;
        `kernels/align.py` defines it.
        """
        rows = self._check(texts, trees, idx_mapping, num_sampled, head)
        output = Aligned(*(each[:rows] for each in self._output))
        if not rows:
            return output
        batch = Alignment(
            texts,
            trees,
            idx_mapping,
            num_sampled,
            self._scan,
            self._vocabulary,
            head,
        )
        return align(batch, output)

    def _check(
        self,
        texts: Texts,
        trees: Trees,
        idx_mapping: Tensor,
        num_sampled: Tensor,
        head: Head | None,
    ) -> int:
        """Checks the operands; gives the number of rows."""
        if (head is not None) != self._beside_head:
            raise InvalidValueError(
                f"head must be given with beside_head=True alone, got {head} with "
                f"{self._beside_head}"
            )
        int32, float32 = (torch.int32,), (torch.float32,)
        check_tensor("texts.token_ids", texts.token_ids, int32, dimensions=2)
        if texts.token_ids.stride(1) != 1:
            raise InvalidValueError(
                "texts.token_ids must have the tokens of a row side by side, got strides "
                f"{texts.token_ids.stride()}"
            )
        slots = len(texts.token_ids)
        check_tensor("trees.token_ids", trees.token_ids, int32, dimensions=2)
        nodes = (slots, trees.token_ids.shape[1])
        if not 1 <= nodes[1] <= 1 << 10:
            raise InvalidValueError(
                f"trees.token_ids must have from 1 to 1024 nodes, got {nodes[1]}"
            )
        check_tensor("idx_mapping", idx_mapping, INTEGER_TYPES, dimensions=1)
        rows = len(idx_mapping)
        if rows > len(self._output.counts):
            raise InvalidValueError(
                f"idx_mapping must have at most max_rows {len(self._output.counts)} rows, got "
                f"{rows}"
            )
        lookahead = self._output.token_ids.shape[1]
        of_head: list[tuple[str, Tensor, Any, tuple[int, ...]]] = []
        if head is not None:
            check_tensor("head.first", head.first, float32, dimensions=2)
            of_head = [
                ("head.token_ids", head.token_ids, INTEGER_TYPES, (rows, lookahead)),
                ("head.acceptance", head.acceptance, float32, (lookahead,)),
                ("head.first", head.first, float32, (2, max(head.first.shape[1], 1))),
            ]
        device = self._output.counts.device
        for name, value, dtypes, shape in (
            ("texts.token_ids", texts.token_ids, int32, texts.token_ids.shape),
            ("texts.lengths", texts.lengths, int32, (slots,)),
            ("texts.requests", texts.requests, int32, (slots,)),
            ("texts.limits", texts.limits, int32, (slots,)),
            ("trees.bases", trees.bases, int32, (slots,)),
            ("trees.counts", trees.counts, int32, (slots,)),
            ("trees.token_ids", trees.token_ids, int32, nodes),
            ("trees.parents", trees.parents, int32, nodes),
            ("trees.probabilities", trees.probabilities, float32, nodes),
            ("trees.requests", trees.requests, int32, (slots,)),
            ("idx_mapping", idx_mapping, INTEGER_TYPES, (rows,)),
            ("num_sampled", num_sampled, INTEGER_TYPES, (rows,)),
            *of_head,
        ):
            check_tensor(name, value, dtypes, dimensions=len(shape))
            if value.shape != shape:
                raise InvalidValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
            # The host's own buffer of texts may have rows apart.
            if value is not texts.token_ids and not value.is_contiguous():
                raise InvalidValueError(f"{name} must be contiguous, got strides {value.stride()}")
            if value.device != device:
                raise InvalidValueError(f"{name} must be on {device}, got {value.device}")
        return rows
