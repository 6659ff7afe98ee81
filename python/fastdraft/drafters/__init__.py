"""Drafters: the protocol between a decoding loop and any drafter, and draft models.

`Engine` satisfies the protocol as it is. `AssistantModel` and `Staged` name models that draft;
`fastdraft.hf` makes a drafter of them for each generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fastdraft import DraftStats
from fastdraft.drafters.assistant import AssistantModel, Staged

__all__ = ["AssistantModel", "Drafter", "Drafts", "Staged"]


class Drafts(Protocol):
    """The drafts of a batch: flat columns, row r's from `offsets[r]` to `offsets[r + 1]`.

    A draft is a chain, parents -1, 0, 1, ..., or a tree, in which a parent stands before its
    children and these have different tokens.

    Drafts that were sampled have a further attribute `draft_logits`: a dict from the row to the
    logits whose softmax each token of its draft was drawn from, (drafted, vocabulary) on the device
    of the target's logits. Such a draft is a chain, drawn with random numbers that verification
    does not use.
    """

    @property
    def token_ids(self) -> NDArray[np.int32]: ...

    @property
    def parents(self) -> NDArray[np.int32]:
        """The index of each token's parent in its row's draft, -1 for the text's last token."""
        ...

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """The probability that a token and all that lead to it are accepted."""
        ...

    @property
    def offsets(self) -> NDArray[np.int32]: ...


@runtime_checkable
class Drafter(Protocol):
    """Drafts the next tokens of requests.

    A request lives from `add_request` to `finish` or `cancel`. Between them, every target step is
    one `propose_batch` and one `observe_batch`, each with any subset of the live requests.

    A drafter that ignores `cost` may say so with an attribute `weighs_cost` of False; then the loop
    makes no step without drafts just to measure its time.
    """

    def add_request(self, prompt_ids: Any, *, prediction: Any = None) -> int:
        """Starts a request over `prompt_ids` and answers its id.

        Args:
            prompt_ids: Integers, or an int32 or int64 buffer, of shape (tokens,). May be empty.
            prediction: The same, the text that is expected in the output; `None` for none.

        A drafter that takes templates, text that parts of the output may look like, has a further
        keyword `templates`, and gets it only where a caller gives some.
        """
        ...

    def propose_batch(
        self,
        requests: Sequence[int],
        *,
        limits: NDArray[np.int32] | None = None,
        cost: NDArray[np.float64] | None = None,
        padded: bool = False,
    ) -> Drafts:
        """Drafts for `requests`, in their order.

        Args:
            requests: Ids of live requests.
            limits: The most tokens to draft, one a request; 0 for none.
            cost: `cost[n - 1]` is the time of a target forward over n tokens in all.
            padded: Whether the forward pads every row to the longest draft.
        """
        ...

    def observe_batch(
        self,
        requests: Sequence[int],
        emitted_ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
    ) -> None:
        """Tells the tokens that the target emitted in this step, accepted drafts included.

        Args:
            requests: Ids of live requests.
            emitted_ids: The tokens of all requests, one request after the other.
            offsets: Where each request's tokens begin, of length `len(requests) + 1`.
        """
        ...

    def finish(self, request: int) -> DraftStats:
        """Ends a request and answers what its drafts were worth."""
        ...

    def cancel(self, request: int) -> None:
        """Ends a request whose output is thrown away."""
        ...
