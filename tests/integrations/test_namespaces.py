"""Requests of one namespace never draft text of another, whatever happens in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import DraftConfig, Engine, Memory
from fastdraft.errors import InvalidValueError
from fastdraft.integrations import host
from fastdraft.integrations.host import HostRequests, Text

# The tokens of a namespace begin with its number: a foreign one shows in each draft.
WIDTH = 1000
NAMES: list[dict[str, Any]] = [
    {},
    {"salt": "s"},
    {"adapter": "s"},
    {"name": "s"},
    {"adapter": "s", "salt": "s"},
    {"name": "everybody"},
]
EVERYBODY = len(NAMES) - 1


class Host(HostRequests[Text]):
    """Starts, steps and ends requests as a serving stack does."""

    def begin(self, key: int, prompt: list[int], owner: dict[str, Any], **params: Any) -> Text:
        text = self._texts[key] = Text()
        if "name" in owner:
            params[host.NAMESPACE] = owner["name"]
        where = {part: owner[part] for part in ("adapter", "salt") if part in owner}
        self._add(text, prompt, params, **where)
        return text

    def step(self, emitted: dict[int, list[int]]) -> dict[int, list[int]]:
        texts = [self._texts[key] for key in emitted]
        flat = [token for tokens in emitted.values() for token in tokens]
        offsets = [0]
        for tokens in emitted.values():
            offsets.append(offsets[-1] + len(tokens))
        self._observe(texts, flat, offsets)
        drafts = self._propose(texts, [64] * len(texts), None)
        return dict(zip(emitted, drafts.tolist(), strict=True))

    def end(self, key: int) -> None:
        self._end([key])

    def abort(self, key: int) -> None:
        self._give_up(self._texts.pop(key))


def make(*, tree: bool = False, max_bytes: int = 1 << 20, shared: tuple[str, ...] = ()) -> Host:
    config = DraftConfig(token_cost=0.0, lookahead=8, tree_budget=32 if tree else None)
    return Host(Engine(config), Memory(max_bytes), shared=shared)


# A word is a few of a namespace's tokens; texts repeat words, so that there is much to draft.
words = st.lists(st.integers(0, 5), min_size=1, max_size=12)
acts = st.lists(
    st.tuples(
        st.integers(0, EVERYBODY),
        words,
        st.sampled_from(["plain", "predicted", "templates", "corpus", "sibling", "apart"]),
        st.sampled_from(["run", "run", "end", "end", "abort"]),
    ),
    min_size=1,
    max_size=40,
)


def spell(owner: int, drawn: list[int], first: int = 0) -> list[int]:
    return [owner * WIDTH + first + 10 * word + i for word in drawn for i in range(6)]


@given(acts, st.booleans(), st.sampled_from([1 << 20, 200_000]))
@settings(deadline=None)
def test_no_token_of_one_namespace_is_drafted_in_another(
    drawn: list[tuple[int, list[int], str, str]], tree: bool, max_bytes: int
) -> None:
    here = make(tree=tree, max_bytes=max_bytes, shared=("everybody",))
    owners: dict[int, int] = {}
    for key, (owner, word, kind, then) in enumerate(drawn):
        params: dict[str, Any] = {
            "predicted": {host.PREDICTION: spell(owner, word[::-1])},
            "templates": {host.TEMPLATES: spell(owner, word[::-1])},
            "corpus": {host.CORPUS_ID: "c", host.CORPUS: spell(owner, word, first=100)},
            "sibling": {host.CORPUS_ID: "c"},
            "apart": {host.REMEMBER: False},
        }.get(kind, {})
        here.begin(key, spell(owner, word), NAMES[owner], **params)
        owners[key] = owner
        drafts = here.step({row: spell(owners[row], word[:1])[:3] for row in owners})
        for row, draft in drafts.items():
            allowed = {owners[row], EVERYBODY}
            assert {token // WIDTH for token in draft} <= allowed, (row, draft)
        if then == "end":
            here.end(key)
            del owners[key]
        elif then == "abort":
            here.abort(key)
            del owners[key]
    assert here.faults == 0


def test_what_was_said_is_drafted_within_a_namespace() -> None:
    """Isolation alone would be kept by drafting nothing."""
    here = make(shared=("everybody",))
    for owner, name in enumerate(NAMES):
        here.begin(0, spell(owner, [0, 1, 2]), name)
        here.end(0)
        here.begin(1, [], name)
        assert here.step({1: spell(owner, [0])})[1][:6] == spell(owner, [1])
        here.end(1)
    for name in NAMES:
        here.begin(2, [], name)
        assert here.step({2: spell(EVERYBODY, [0])})[2][:6] == spell(EVERYBODY, [1])
        here.abort(2)


def test_a_corpus_is_shared_by_siblings() -> None:
    here = make()
    corpus = list(range(100, 140))
    here.begin(0, [1], NAMES[1], **{host.CORPUS_ID: "c", host.CORPUS: corpus})
    here.begin(1, [2], NAMES[1], **{host.CORPUS_ID: "c"})
    here.begin(2, [3], NAMES[2], **{host.CORPUS_ID: "c"})
    drafts = here.step({key: [109, 110] for key in range(3)})
    assert drafts == {0: corpus[11:19], 1: corpus[11:19], 2: []}


def test_an_aborted_request_leaves_nothing() -> None:
    here = make()
    here.begin(0, [*range(10, 40)], {})
    here.abort(0)
    here.begin(1, [], {})
    assert here.step({1: [10, 11, 12]}) == {1: []}


@pytest.mark.parametrize(
    "params",
    [{host.NAMESPACE: ""}, {host.NAMESPACE: 7}, {host.NAMESPACE: "x" * 257}, {host.CORPUS_ID: [1]}],
)
def test_names_that_are_refused(params: dict[str, Any]) -> None:
    here = make()
    with pytest.raises(InvalidValueError, match="must be a text of 1 to 256 characters, got"):
        here.begin(0, [1, 2], {}, **params)
