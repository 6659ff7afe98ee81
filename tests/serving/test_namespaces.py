"""Requests of a host at one engine: namespaces, options, and long texts."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, DraftConfig, Engine, Memory
from fastdraft.serving import request_options as options
from fastdraft.serving.host import HostRequests, Text

# All namespaces share the first half of a word's tokens, so that their texts match. The second half
# starts with the namespace's number, so a draft from a foreign namespace shows it.
WIDTH = 1000
COMMON = 9
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
            params[options.NAMESPACE] = owner["name"]
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
    return [
        (owner * WIDTH + first if i > 2 else COMMON * WIDTH) + 10 * word + i
        for word in drawn
        for i in range(6)
    ]


@given(acts, st.booleans(), st.sampled_from([1 << 20, 200_000]))
@settings(deadline=None)
def test_no_token_of_one_namespace_is_drafted_in_another(
    drawn: list[tuple[int, list[int], str, str]], tree: bool, max_bytes: int
) -> None:
    here = make(tree=tree, max_bytes=max_bytes, shared=("everybody",))
    owners: dict[int, int] = {}
    for key, (owner, word, kind, then) in enumerate(drawn):
        params: dict[str, Any] = {
            "predicted": {options.PREDICTION: spell(owner, word[::-1])},
            "templates": {options.TEMPLATES: spell(owner, word[::-1])},
            "corpus": {options.CORPUS_ID: "c", options.CORPUS: spell(owner, word, first=100)},
            "sibling": {options.CORPUS_ID: "c"},
            "apart": {options.REMEMBER: False},
        }.get(kind, {})
        here.begin(key, spell(owner, word), NAMES[owner], **params)
        owners[key] = owner
        drafts = here.step({row: spell(owners[row], word[:1])[:3] for row in owners})
        for row, draft in drafts.items():
            allowed = {owners[row], EVERYBODY, COMMON}
            assert {token // WIDTH for token in draft} <= allowed, (row, draft)
        if then == "end":
            here.end(key)
            del owners[key]
        elif then == "abort":
            here.abort(key)
            del owners[key]
    assert here.faults == 0


def test_earlier_answers_are_drafted_within_a_namespace() -> None:
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
    here.begin(0, [1], NAMES[1], **{options.CORPUS_ID: "c", options.CORPUS: corpus})
    here.begin(1, [2], NAMES[1], **{options.CORPUS_ID: "c"})
    here.begin(2, [3], NAMES[2], **{options.CORPUS_ID: "c"})
    drafts = here.step({key: [109, 110] for key in range(3)})
    assert drafts == {0: corpus[11:19], 1: corpus[11:19], 2: []}


def test_a_corpus_may_take_the_room_of_its_own_namespace() -> None:
    here = make(max_bytes=200_000)
    corpus = list(range(100, 10_100))
    text = here.begin(0, [1], NAMES[1], **{options.CORPUS_ID: "c", options.CORPUS: corpus})
    here.drain()
    assert here.step({0: corpus[-20:-15]}) == {0: corpus[-15:-7]}
    assert not text.remembered
    assert here.faults == here.refused == 0


def test_an_aborted_request_leaves_nothing() -> None:
    here = make()
    here.begin(0, [*range(10, 40)], {})
    here.abort(0)
    here.begin(1, [], {})
    assert here.step({1: [10, 11, 12]}) == {1: []}


@pytest.mark.parametrize("value", ["false", None])
def test_a_switch_that_says_neither_keeps_the_request_apart(value: object) -> None:
    """Who misspells an opt-out has not opted in."""
    here = make()
    here.begin(0, [*range(10, 40)], {}, **{options.REMEMBER: value})
    here.end(0)
    here.begin(1, [], {})
    assert here.step({1: [10, 11, 12]}) == {1: []}
    assert (here.refused, here.faults) == (1, 0)


@pytest.mark.parametrize(
    "params",
    [
        {options.NAMESPACE: ""},
        {options.PREDICTION: [10**12]},
        {options.TEMPLATES: [1.5]},
        {"fastdraft_namespaces": "x"},
    ],
)
def test_a_wrong_option_costs_its_request_the_drafts_and_hides_no_fault(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    here = make()
    here.begin(0, [1, 2], {}, **params)
    assert not here._texts[0].is_drafted
    assert (here.refused, here.faults) == (1, 0)
    here.begin(1, [1, 2], {})
    here._guard([here._texts[1]], here._observe, [here._texts[1]], [-1], [0, 1])
    assert (here.refused, here.faults) == (1, 1)
    assert ["options are wrong" in record.message for record in caplog.records] == [True, False]


def test_long_texts_are_indexed_beside_the_steps() -> None:
    """Neither a long prompt nor its end is indexed in the caller's step, and nothing is lost."""
    here, gate = make(max_bytes=1 << 24), threading.Event()
    assert here._thread is not None
    prompt = np.random.default_rng(0).integers(0, WIDTH, 100_000).tolist()
    here._thread.submit(gate.wait)
    here.begin(0, prompt, {})
    here.begin(1, [1, 2, 3, 1, 2], {})
    # The other row has drafts while the long one waits.
    assert here.engine.num_requests == 1
    assert here.step({1: [3]})[1][:2] == [1, 2]
    text = here._texts[0]
    assert text.request is None and text.is_drafted
    text.missed.append(np.array(prompt[:20]))
    gate.set()
    here.drain()
    assert here._texts[0].request is not None
    assert here.step({0: prompt[20:22]})[0] == prompt[22:30]

    gate.clear()
    here._thread.submit(gate.wait)
    here.end(0)
    assert here.engine.num_requests == 2
    gate.set()
    here.drain()
    assert here.engine.num_requests == 1
    here.begin(2, [], {})
    assert here.step({2: prompt[-500:-496]})[2] == prompt[-496:-488]
    assert here.faults == here.refused == 0


@pytest.mark.parametrize("end", ["end", "abort"])
def test_a_long_text_may_end_before_it_is_indexed(end: str) -> None:
    here, gate = make(max_bytes=1 << 24), threading.Event()
    assert here._thread is not None
    prompt = np.random.default_rng(0).integers(0, WIDTH, 10_000).tolist()
    here._thread.submit(gate.wait)
    here.begin(0, prompt, {})
    here._texts[0].missed.append(np.arange(20))
    getattr(here, end)(0)
    gate.set()
    here.drain()
    assert here.num_requests == here.engine.num_requests == here.faults == 0
    assert here.stats.emitted == (20 if end == "end" else 0)
    here.begin(1, [], {})
    assert (here.step({1: prompt[500:504]})[1] != []) == (end == "end")


def test_a_long_text_that_is_refused_is_counted() -> None:
    here = make()
    here.begin(0, [-1] * 10_000, {})
    here.drain()
    here.begin(1, [-1] * 10_000, {})
    here.end(1)
    here.drain()
    assert (here.refused, here.faults, here.engine.num_requests) == (2, 0, 0)


def test_a_fork_goes_on_without_the_thread_of_its_parent() -> None:
    host = make()
    for key in range(3):
        host.begin(key, list(range(20_000)), {})
    with host._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            host.begin(9, list(range(20_000)), {})
            for key in (0, 9):
                host.end(key)
            host.drain()
            host.totals(host.stats)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    host.drain()


def test_ranks_that_must_draft_the_same_leave_nothing_to_a_thread() -> None:
    here = Host(Engine(), Memory(0), in_step=True)
    here.begin(0, list(range(10_000)), {})
    assert here._texts[0].request is not None
    assert here._thread is None


def test_tokens_beyond_the_vocabulary_are_never_drafted(caplog: pytest.LogCaptureFixture) -> None:
    store = Datastore()
    store.add([300, 301, 302, 905, 906] * 3)
    engine = Engine(DraftConfig(token_cost=0.0, vocabulary=900))
    here = Host(engine, Memory(0), [store])
    for key in range(2):
        here.begin(key, [300], {})
        assert here.step({key: [301]}) == {key: [302]}
    assert here.faults == 1
    [record] = caplog.records
    assert "another tokenizer" in record.getMessage()


def test_a_store_that_was_closed_stops_nothing() -> None:
    here = make()
    here.begin(0, [1, 2, 3], {})
    here.memory.of(None)[0].close()
    here.begin(1, [4, 5, 6, 4, 5], {})
    assert here.step({0: [1, 2], 1: [6]})[1][:2] == [4, 5]
    here.end(0)
    here.end(1)
    assert here.engine.num_requests == here.faults == 0
