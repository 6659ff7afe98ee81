"""The texts of SGLang's requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft import Successors
from fastdraft.serving.host import Text

__all__ = ["END", "RequestText", "Row", "ends_of"]

END: Final = 3
"""How many last tokens of a text successors need."""


@dataclass(slots=True)
class RequestText(Text):
    """The text of a request."""

    prompt_size: int = 0
    begun: int = 0
    """The tokens of its output when it began here: more than none if it had to wait."""
    output_ids: Sequence[int] = ()
    """The host's own list, which grows: another one under the same id is another request."""
    successors: Successors | None = None
    """The likely successors of its tokens, by the target's logits; None if these are not used."""


class Row(NamedTuple):
    """A request in the batch of a step."""

    slot: int  # in the batch
    text: RequestText
    tail: Sequence[int]
    total: int


def ends_of(rows: Iterable[Row]) -> NDArray[np.int32]:
    """The last tokens of each text, (rows, `END`); -1 for those before it and for what is no
    token's id, as an image's in a prompt."""
    ends = np.array([([-1] * END + list(row.tail[-END:]))[-END:] for row in rows], np.int64)
    ends[(ends < 0) | (ends > np.iinfo(np.int32).max)] = -1
    return ends.astype(np.int32)
