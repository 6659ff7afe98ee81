"""The study of old drafts replays the alignment that the device computes; both on one text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import DraftConfig, Engine
from fastdraft.alignment import PROBABILITIES, Aligner, Texts, Trees
from staleness import PRIOR, Chances, Scan, Tree, Variant, align

LOOKAHEAD, NODES, WINDOW, ROOM = 6, 24, 20, 80
VARIANT = Variant(1, lookahead=LOOKAHEAD, scan=Scan(window=WINDOW, learned=False))
ALIGNER = Aligner("cpu", max_rows=1, lookahead=LOOKAHEAD, vocabulary=10, window=WINDOW)

pieces = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=8)


@settings(max_examples=200, deadline=None)
@given(pieces, st.integers(1, 3), st.data())
def test_the_study_aligns_as_the_device_does(
    some: list[list[int]], times: int, data: st.DataObject
) -> None:
    text = [token for piece in some for token in piece * times][: ROOM - LOOKAHEAD]
    base = data.draw(st.integers(max(1, len(text) - 2 * (LOOKAHEAD + 1)), len(text)))
    engine = Engine(DraftConfig(lookahead=3 * (LOOKAHEAD + 1), tree_budget=NODES))
    draft = engine.propose(engine.add_request(text[:base]), token_cost=0.0)
    tree = Tree(base, draft.tolist(), draft.parents.tolist(), draft.probabilities.tolist())
    known = np.array(text, np.int32)
    tokens, paths, origin, _ = align(VARIANT, tree, known, len(text), Chances(learned=False))

    def padded(values: list[float], dtype: torch.dtype, room: int = NODES) -> torch.Tensor:
        return torch.tensor([values + [0] * (room - len(values))], dtype=dtype)

    one = torch.ones(1, dtype=torch.int32)
    texts = Texts(padded(text, torch.int32, ROOM), one * len(text), one, one * LOOKAHEAD)
    trees = Trees(
        one * base,
        one * len(draft),
        padded(tree.tokens, torch.int32),
        padded(tree.parents, torch.int32),
        padded(tree.chances, torch.float32),
        one,
    )
    drafts = ALIGNER.align(texts, trees, one - 1, one)
    count = int(drafts.counts[0])
    assert drafts.token_ids[0, :count].tolist() == tokens, origin
    assert drafts.probabilities[0, :count].cumprod(0).tolist() == pytest.approx(paths, abs=1e-5)


def test_they_have_the_same_chances() -> None:
    assert PRIOR == PROBABILITIES
