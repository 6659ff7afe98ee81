"""Memory: stores by namespace within one bound, held against the text that entered."""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, Engine, Memory
from fastdraft.errors import DatastoreClosedError, DatastoreError, InvalidValueError

LEAST = 39_000  # a little more than a store with one chunk of text takes


def text_of(store: Datastore) -> list[int]:
    """All tokens held, document by document."""
    tokens: list[int] = []
    position = store.begin
    while position < store.end:
        part = store.read(position, store.end - position).tolist()
        tokens += part
        position += len(part) + 1
    return tokens


def limits(memory: Memory) -> int:
    return sum(store.max_bytes for store in memory.find(memory.namespaces))


# --- One bound ---

steps = st.lists(
    st.tuples(
        st.sampled_from(["busy", "busy", "often", "a", "b", "c"]),
        st.integers(1, 3000),
        st.sampled_from(["add", "add", "add", "use", "close", "forget", "corpus"]),
    ),
    max_size=60,
)


@given(steps, st.integers(LEAST, 8 * LEAST))
@settings(deadline=None)
def test_the_bound_holds_at_all_times(drawn: list[tuple[str, int, str]], max_bytes: int) -> None:
    memory = Memory(max_bytes)
    entered: dict[str, list[int]] = {}
    for number, (name, size, act) in enumerate(drawn):
        if act == "forget":
            memory.forget(name)
            assert not memory.forget(name)
            entered.pop(name, None)
            continue
        if act == "corpus":
            for store in memory.corpus(name, str(number), list(range(size))):
                assert text_of(store) == list(range(size))[-len(store) :]
            entered = {key: text for key, text in entered.items() if memory.find([key])}
        else:
            [store] = memory.of(name)
            entered.setdefault(name, [])
        if act == "close":
            store.close()
            entered[name] = []
        if act == "add":
            tokens = [number * 10_000 + i for i in range(size)]
            store.add(tokens)
            entered[name] += tokens
        held = {key: memory.find([key]) for key in entered}
        for key, stores in held.items():
            for found in stores:
                # It holds the end of all that entered since it was last lost.
                assert text_of(found) == entered[key][len(entered[key]) - len(found) :]
        entered = {key: text if held[key] else [] for key, text in entered.items()}
        assert memory.bytes <= max_bytes
        assert limits(memory) <= max_bytes
        assert set(memory.namespaces) <= set(entered)


def test_a_namespace_that_nobody_uses_gives_its_text_first() -> None:
    memory = Memory(8 << 20)
    documents = {
        name: [*range(start, start + 1500)] for name, start in (("idle", 0), ("rare", 5000))
    }
    for name, tokens in documents.items():
        memory.of(name)[0].add(tokens)
    number, recent = 10_000, []
    while memory.find(["idle"]):
        number += 1000
        recent.append(number)
        memory.of("busy")[0].add([*range(number, number + 1000)])
        # Text of the busy one that entered later is not touched.
        [busy] = memory.find(["busy"])
        assert len(busy) == 1000 * len(recent)
    for _ in range(200):
        number += 1000
        memory.of("busy")[0].add([*range(number, number + 1000)])
    assert memory.namespaces == ["busy"]
    # A single namespace has all of it.
    assert memory.bytes > 0.9 * memory.max_bytes


def test_a_busy_namespace_leaves_a_rare_one_its_share() -> None:
    """The oldest text of both leaves, so each keeps what it wrote in the same time."""
    memory = Memory(4 << 20)
    random_ = random.Random(0)
    entered = {"busy": 0, "rare": 0}
    for number in range(1500):
        name = "rare" if number % 20 == 0 else "busy"
        [store] = memory.of(name)
        size = random_.randrange(500, 1500)
        store.add([random_.randrange((1 << 22) - 1) for _ in range(size)])
        entered[name] += size
    held = {name: len(memory.find([name])[0]) for name in entered}
    assert held["busy"] < entered["busy"] / 4
    assert 0.5 < (held["rare"] / entered["rare"]) / (held["busy"] / entered["busy"]) < 3


def test_made_up_names_do_not_empty_the_memory() -> None:
    memory = Memory(8 << 20)
    tenants = [f"tenant {number}" for number in range(4)]
    for number, tenant in enumerate(tenants):
        for part in range(60):
            memory.of(tenant)[0].add(range(part * 1000 + number, part * 1000 + number + 1000))
    before = {tenant: len(memory.find([tenant])[0]) for tenant in tenants}
    for number in range(2000):
        memory.of(f"made up {number}")[0].add([number, number + 1])
    after = {tenant: sum(map(len, memory.find([tenant]))) for tenant in tenants}
    assert sum(after.values()) > 0.7 * sum(before.values())
    # The latest of them are there.
    assert len(memory.namespaces) > 25 and memory.namespaces[-1] == "made up 1999"
    assert memory.bytes <= memory.max_bytes
    memory.clear()
    assert memory.bytes == 0 and memory.namespaces == []


def test_engines_in_threads_keep_to_the_bound() -> None:
    memory, engine = Memory(12 * LEAST), Engine()
    exceeded: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if memory.bytes > memory.max_bytes:
                exceeded.append(memory.bytes)

    def run(seed: int) -> None:
        random_ = random.Random(seed)
        for _ in range(60):
            name = random_.randrange(8)
            try:
                request = engine.add_request([name] * 3, datastores=memory.of(name))
            except DatastoreClosedError:  # it has just given way to another thread's
                continue
            engine.observe(request, [random_.randrange(1 << 20) for _ in range(2000)])
            memory.of(name)
            engine.finish(request)

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert not exceeded
    assert engine.num_requests == 0


# --- Who sees what ---


def test_a_request_enters_its_own_store_alone() -> None:
    memory, engine = Memory(1 << 20), Engine()
    memory.of("everybody")[0].add([1, 2, 3, 4])
    assert memory.find(["nobody"]) == []
    request = engine.add_request(
        [9, 1, 2], datastores=memory.of("tenant"), read_only=memory.find(["everybody", "everybody"])
    )
    assert engine.propose(request, token_cost=0).tolist() == [3, 4]
    engine.observe(request, [7, 8])
    engine.finish(request)
    assert text_of(memory.of("everybody")[0]) == [1, 2, 3, 4]
    assert text_of(memory.of("tenant")[0]) == [9, 1, 2, 7, 8]
    assert memory.namespaces == ["everybody", "tenant"]


def test_read_only_stores_come_besides_the_engines() -> None:
    own, read = Datastore(max_bytes=1 << 20), Datastore(max_bytes=1 << 20)
    engine = Engine(datastores=[own])
    read.add([5, 6, 7])
    request = engine.add_request([4, 5], read_only=[read])
    assert engine.propose(request, token_cost=0).tolist() == [6, 7]
    engine.finish(request)
    assert (len(own), len(read)) == (2, 3)
    with pytest.raises(InvalidValueError, match="datastores must differ, got one twice"):
        engine.add_request([1], read_only=[own])
    read.close()
    with pytest.raises(DatastoreClosedError, match="at index 1 is closed"):
        engine.add_request([1], read_only=[read])


def test_a_corpus_is_built_once_and_seen_by_its_namespace_alone() -> None:
    memory = Memory(1 << 20)
    assert memory.corpus("tenant", "repo") == []
    [built] = memory.corpus("tenant", "repo", [1, 2, 3])
    [again] = memory.corpus("tenant", "repo", [4, 5, 6])
    assert again is built and text_of(built) == [1, 2, 3]
    assert memory.corpus("other", "repo") == []
    assert memory.namespaces == []
    assert memory.forget("tenant") and built.closed
    assert memory.corpus("tenant", "repo") == []
    assert not memory.forget("tenant")


@pytest.mark.parametrize(
    "name", [("tenant", "repo"), ("tenant", "repo", None), ("tenant", None), "tenant", None]
)
def test_no_namespace_is_called_as_a_corpus_is(name: Hashable) -> None:
    memory = Memory(1 << 20)
    [corpus] = memory.corpus("tenant", "repo", [1, 2, 3])
    [inner] = memory.corpus(("tenant", "repo"), "repo", [4, 5, 6])
    assert memory.find([name]) == []
    assert text_of(memory.of(name)[0]) == []
    memory.forget(name)
    assert corpus.closed == (name == "tenant") and inner.closed == (name == ("tenant", "repo"))


def test_a_corpus_is_indexed_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(8 << 20)
    begun, go_on = threading.Event(), threading.Event()
    add = Datastore.add

    def late(store: Datastore, *args: object, **options: object) -> None:
        begun.set()
        assert go_on.wait(60)
        add(store, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Datastore, "add", late)
    found: list[list[Datastore]] = []
    bringing = threading.Thread(
        target=lambda: found.append(memory.corpus("tenant", "repo", range(9)))
    )
    bringing.start()
    assert begun.wait(60)
    done = threading.Event()
    other = threading.Thread(
        target=lambda: (memory.of("b"), memory.corpus("tenant", "repo"), done.set()), daemon=True
    )
    other.start()
    assert done.wait(10)
    go_on.set()
    bringing.join()
    assert text_of(found[0][0]) == list(range(9))


def test_a_corpus_that_is_forgotten_while_it_is_indexed_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(8 << 20)
    add = Datastore.add

    def forgotten(store: Datastore, *args: object, **options: object) -> None:
        memory.forget("tenant")
        add(store, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Datastore, "add", forgotten)
        assert memory.corpus("tenant", "repo", range(9)) == []
    assert memory.corpus("tenant", "repo") == [] and memory.bytes == 0


def test_a_corpus_in_use_stays_while_text_comes_and_goes() -> None:
    memory = Memory(20 * LEAST)
    [used] = memory.corpus(None, "used", range(6000))
    whole = len(used)
    [left] = memory.corpus(None, "left", range(1000))
    for number in range(200):
        memory.of(None)[0].add([*range(number * 1000, number * 1000 + 1000)])
        assert memory.corpus(None, "used") == [used] and len(used) == whole
    assert left.closed
    # The end of one that is too large is kept.
    [large] = memory.corpus(None, "large", range(100_000))
    assert 1000 < len(large) < 100_000 and text_of(large)[-1] == 99_999
    assert memory.bytes <= memory.max_bytes


def test_a_corpus_is_whole_where_the_memory_has_room() -> None:
    memory = Memory(32 << 20)
    tokens = np.random.default_rng(0).integers(0, 2**22 - 1, 300_000)  # no n-gram twice
    [corpus] = memory.corpus(None, "repo", tokens)
    # It enters in pieces, each of which begins with 64 tokens of context.
    assert corpus.begin == 0 and len(corpus) == 300_000 + 64 * (corpus.num_documents - 1)


def test_names_that_are_equal_but_of_another_type_are_kept_apart() -> None:
    """As a fleet keeps them apart, which writes their types."""
    memory = Memory(8 << 20)
    names: list[Hashable] = [1, True, 1.0, ("t", 1), ("t", True)]
    for number, name in enumerate(names):
        memory.of(name)[0].add([100 + number] * 9)
    for number, name in enumerate(names):
        [store] = memory.find([name])
        assert set(text_of(store)) == {100 + number}
    assert len(memory.find(names)) == len(names)
    assert list(map(repr, memory.namespaces)) == list(map(repr, names))
    assert memory.forget(True) and not memory.find([True]) and memory.find([1])


def test_without_memory_there_are_no_stores() -> None:
    memory = Memory(0)
    assert memory.of("a") == memory.corpus("a", "b", [1]) == memory.find(["a"]) == []
    assert memory.bytes == 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"max_bytes must be at least \d+, got 1000"):
        Memory(1000)
    with pytest.raises(InvalidValueError, match="fingerprint must be 32 bytes, got 1"):
        Memory(1 << 20, fingerprint=b"1")
    memory = Memory(1 << 20, fingerprint=bytes(32))
    assert memory.of("a")[0].fingerprint == bytes(32)
    with pytest.raises(InvalidValueError, match="corpus_id must be a text, got 7"):
        memory.corpus("a", 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="token_ids"):
        memory.corpus("a", "b", [-1])
    assert memory.corpus("a", "b") == []


# --- The limit of one store ---


def test_limits_that_are_refused(tmp_path: object) -> None:
    store = Datastore(max_bytes=1 << 20)
    with pytest.raises(InvalidValueError, match="max_bytes must be at least 0, got -1"):
        store.limit(-1)
    store.save(f"{tmp_path}/frozen.fds")
    with pytest.raises(DatastoreError, match="a frozen datastore has the size of its file"):
        Datastore.open(f"{tmp_path}/frozen.fds").limit(1 << 20)
    store.close()
    with pytest.raises(DatastoreClosedError):
        store.limit(1 << 20)
