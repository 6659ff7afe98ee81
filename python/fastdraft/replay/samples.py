"""The sample of requests that comes with the package.

Its records are made up, and answered by the demo model or by hand (`answered_by` says which);
`tools/sample.py` wrote them. The text of every token lies beside them, so no tokenizer is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fastdraft.replay.records import Record, RecordError, read_families
from fastdraft.replay.trace import Decode

__all__ = ["SAMPLE", "Pieces", "Sample", "read_sample"]

SAMPLE = Path(__file__).parent / "sample"
"""The folder with a file of records for each family."""


class Sample(NamedTuple):
    """The sample of requests."""

    families: dict[str, list[Record]]
    """The records by family."""
    decode: Decode
    """Turns their token ids into text."""


class Pieces:
    """The text of the sample's tokens, instead of the tokenizer that they are of."""

    @cached_property
    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((SAMPLE / "pieces.json").read_text("utf-8"))
        return content

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        pieces = self._content["pieces"].items()
        return {
            int(i): each.encode() if isinstance(each, str) else bytes(each) for i, each in pieces
        }

    @property
    def tokenizer(self) -> str:
        """The name of the tokenizer."""
        return str(self._content["tokenizer"])

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        """Refuses: the sample's records have token ids."""
        raise RecordError(f"{SAMPLE} must hold token ids, got the text {texts[0]!r:.40}")

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; an id that the sample has not is shown as a number."""
        pieces = self._pieces
        return b"".join(pieces.get(i, b"<%d>" % i) for i in ids).decode("utf-8", "replace")


def read_sample(*, references: bool = False) -> Sample:
    """The sample of requests, and what turns their token ids into text.

    `references` also reads what the callers expected in the outputs.
    """
    pieces = Pieces()
    return Sample(read_families([SAMPLE], pieces.encode, references=references), pieces.decode)
