"""A memory on the disk, a fleet of one: what was said is there again, however a process ended."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, Engine
from fastdraft.errors import DatastoreError
from fleets import join, only, read, say
from killed_memory import check_killed, restored


def test_what_was_said_is_drafted_after_a_start(tmp_path: Path) -> None:
    engine, replica = Engine(), join(str(tmp_path))
    request = engine.add_request([1, 2, 3], datastores=replica.memory.of("a"))
    engine.observe(request, [4, 5, 6])
    engine.finish(request)
    replica.close()
    replica.close()

    replica = join(str(tmp_path))
    read(replica, "a")
    [store] = replica.find(["a"])
    assert [found.output for found in store.find([9, 3, 4])] == [True]
    assert [found.output for found in store.find([9, 1])] == [False]
    request = engine.add_request(
        [9, 3, 4], datastores=replica.memory.of("a"), read_only=replica.find(["a"])
    )
    assert engine.propose(request, token_cost=0).tolist() == [5, 6]
    assert read(replica, "b") == []
    replica.close()


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 200), st.booleans()), max_size=12),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None, max_examples=25)
def test_starts_and_saves_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, lives: list[list[tuple[str, int, bool]]]
) -> None:
    path = tmp_path_factory.mktemp("memory")
    entered: dict[str, list[list[int]]] = {"a": [], "b": []}
    number = 0
    for life in lives:
        replica = join(str(path))
        for name, documents in entered.items():
            assert read(replica, name) == documents
        for name, size, save in life:
            number += 1
            say(replica, name, [number] * size)
            entered[name].append([number] * size)
            if save:
                assert replica.refresh()
        replica.close()
        for name in entered:  # what it said itself is in its live stores
            assert len(read(replica, name)) <= len(entered[name])
    for name, documents in entered.items():
        assert restored(path, name) == documents


@pytest.mark.parametrize("alphabet", [2, 100_000])
def test_much_text_is_saved_and_read_whole(tmp_path: Path, alphabet: int) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 300_000)
    replica = join(str(tmp_path), memory_bytes=64 << 20)
    for part in np.split(text, 100):
        say(replica, "much", part.tolist())
    replica.close()
    found = restored(tmp_path, "much")
    assert [len(part) for part in found] == [3000] * 100
    assert np.array_equal(np.concatenate(found), text)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_process_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    assert check_killed(tmp_path, times=12, seed=0) > 0


def test_a_folder_that_cannot_be_written_costs_no_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    replica = join(str(tmp_path / "file" / "folder"))
    say(replica, "tenant", [1, 2, 3])
    assert not replica.refresh() and not replica.refresh()
    assert replica.faults["publish"] >= 2
    assert caplog.text.count("cannot publish the fleet's memory") == 1
    assert replica.memory.of("tenant")[0].find([9, 1, 2])
    replica.close()


def test_two_processes_may_use_a_folder(tmp_path: Path) -> None:
    one, other = join(str(tmp_path)), join(str(tmp_path))
    say(one, "t", [1] * 9)
    say(other, "t", [2] * 9)
    assert one.refresh() and other.refresh()
    assert read(one, "t") == [[2] * 9] and read(other, "t") == [[1] * 9]
    only(str(tmp_path)).join()
    assert restored(tmp_path, "t") == [[1] * 9, [2] * 9]


# --- Documents of one store in another ---


def test_all_documents_of_a_store_are_added(tmp_path: Path) -> None:
    source = Datastore(max_bytes=1 << 20)
    saved, dumped = Datastore(max_bytes=1 << 20), Datastore(max_bytes=1 << 20)
    chat = list(range(200))
    source.add(chat[:100], prompt_size=40)
    source.add(chat, prompt_size=150)  # its beginning is stored once
    source.add([7] * 5000, prompt_size=4990)
    end = source.save(tmp_path / "all.fds")
    assert end == source.end
    source.add([8, 8])
    assert source.save(tmp_path / "new.fds", first=end) == source.end
    assert len(Datastore.open(tmp_path / "new.fds")) == 2
    for name in ("all.fds", "new.fds"):
        saved.add_all(Datastore.open(tmp_path / name))
    dump, middle = source._dump(0, end)
    assert middle == end
    dumped._load(dump, None)
    dump, end = source._dump(middle, 1 << 30)
    assert end == source.end
    dumped._load(dump, None)
    for store in (saved, dumped):
        for text in (chat[:50], chat[:120], chat[:180], [7] * 20, [8]):
            for a, b in zip(source.find(text), store.find(text), strict=True):
                assert (a.length, a.output) == (b.length, b.output)
                assert source.read(a.next, 20).tolist() == store.read(b.next, 20).tolist()
        assert len(source) == len(store)
    with pytest.raises(ValueError, match="source must be another datastore"):
        saved.add_all(saved)
    with pytest.raises(ValueError, match="text must have 5 bytes a token, got 7"):
        saved._load(b"1234567", None)
    with pytest.raises(DatastoreError, match="a frozen datastore takes no more text"):
        Datastore.open(tmp_path / "new.fds").add_all(saved)
