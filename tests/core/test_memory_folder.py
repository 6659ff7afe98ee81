"""A memory on the disk: what was saved is there again, whenever the process ended."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, Engine, Memory
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.memory_folder import MemoryFolder
from killed_memory import KEY, check_killed, documents, open_memory, restored

# --- What is saved ---


def test_what_was_said_is_drafted_after_a_start(tmp_path: Path) -> None:
    engine, memory = Engine(), open_memory(tmp_path)
    request = engine.add_request([1, 2, 3], datastores=memory.of("a"))
    engine.observe(request, [4, 5, 6])
    engine.finish(request)
    memory.close()
    memory.close()

    memory = open_memory(tmp_path)
    [store] = memory.of("a")
    memory.save()
    # That a model wrote it is known too.
    assert [found.output for found in store.find([9, 3, 4])] == [True]
    assert [found.output for found in store.find([9, 1])] == [False]
    request = engine.add_request([9, 3, 4], datastores=[store])
    assert engine.propose(request, token_cost=0).tolist() == [5, 6]
    assert len(memory.of("b")[0]) == 0
    memory.close()


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
        memory = open_memory(path)
        stores = {name: memory.of(name)[0] for name in entered}
        memory.save()
        for name, store in stores.items():
            assert documents(store) == entered[name]
        for name, size, save in life:
            number += 1
            stores[name].add([number] * size)
            entered[name].append([number] * size)
            if save:
                memory.save()
        memory.close()


def test_a_start_reads_more_than_a_store_has_room_for_at_first(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    entered = [list(range(number, number + 1500)) for number in range(0, 90_000, 1500)]
    for document in entered:
        memory.of("tenant")[0].add(document)
    memory.close()
    assert restored(tmp_path) == entered


@pytest.mark.parametrize("alphabet", [2, 100_000])
def test_much_text_is_read_whole_and_takes_no_more_room_than_it_needs(
    tmp_path: Path, alphabet: int
) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 300_000)
    folder = MemoryFolder(tmp_path, key=KEY, interval=3600)
    with Datastore() as live:
        for part in np.split(text, 100):
            live.add(part)
        folder.write("much", live, 0, whole=True)
        needed = live.bytes
    # The other's text is older, and would leave first.
    memory = Memory(needed + (3 << 20), folder=folder)
    [other] = memory.of("other")
    other.add(np.arange(15_000))
    memory.save()
    [store] = memory.of("much")
    memory.save()
    assert len(store) == 300_000 and store.begin == 0
    assert len(other) == 15_000
    memory.close()


def test_many_saves_become_one_file_and_text_that_left_goes(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path, key=KEY, interval=3600)
    memory = Memory(1 << 20, folder=folder)
    [store] = memory.of("tenant")
    for number in range(60):
        store.add([number] * 1500)
        memory.save()
        assert len(folder.files("tenant")) <= 16
    held = documents(store)
    memory.close()
    found = restored(tmp_path)
    assert found[-len(held) + 1 :] == held[1:]
    assert sum(len(document) for document in found) < 2 * sum(map(len, held)) + 1500


def test_the_background_saves_by_itself(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path, key=KEY, interval=0.01)
    memory = Memory(1 << 20, folder=folder)
    memory.of("tenant")[0].add([1, 2, 3])
    # Namespaces that come all the time do not keep it from saving.
    while not folder.files("tenant"):
        memory.of("another")
        memory.forget("another")
    memory.close()


# --- Killed at any instant ---


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_process_leaves_an_earlier_state(tmp_path: Path) -> None:
    assert check_killed(tmp_path, times=20, seed=0) > 0


# --- Who may read it ---


def test_names_do_not_touch_the_disk_and_modes_are_the_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        memory = open_memory(tmp_path / "memory")
        memory.of(("secret-adapter", "secret-salt", None))[0].add([1, 2, 3])
        memory.close()
    finally:
        os.umask(before)
    paths = list((tmp_path / "memory").rglob("*"))
    assert len(paths) == 3
    for path in paths:
        assert "secret" not in str(path.relative_to(tmp_path))
        assert b"secret" not in (path.read_bytes() if path.is_file() else b"")
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    # With another key, or for another model, nothing is found.
    for options in ({"key": b"another operator"}, {"key": KEY, "model": "other"}):
        memory = Memory(1 << 20, folder=MemoryFolder(tmp_path / "memory", **options))  # type: ignore[arg-type]
        assert len(memory.of(("secret-adapter", "secret-salt", None))[0]) == 0
        memory.close()
    assert restored(tmp_path / "memory", ("secret-adapter", "secret-salt", None)) == [[1, 2, 3]]


def test_names_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path, key=KEY)
    names = [
        None,
        "None",
        "null",
        1,
        "1",
        ("1",),
        (1,),
        ("a", "b"),
        ("a,b",),
        b"a",
        "a",
        ("a", None),
    ]
    assert len({folder.folder_of(name) for name in names}) == len(names)
    with pytest.raises(InvalidValueError, match="a namespace that is saved must be a text"):
        folder.folder_of(1.5)
    folder.close()


def test_no_byte_of_what_is_forgotten_is_on_the_disk(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    secret = list(range(60_000, 60_100))
    for name, text in (("secret", secret), ("plain", [1] * 100)):
        memory.of(name)[0].add(text)
        memory.save()

    def held() -> bool:
        pairs = [
            a.to_bytes(width, "little") + (a + 1).to_bytes(width, "little")
            for a in secret[:-1]
            for width in (2, 4)
        ]
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        return any(pair in content for pair in pairs for content in files)

    assert held()
    memory.forget("secret")
    assert not held() and "secret" not in memory.namespaces
    memory.save()
    memory.close()
    assert not held()


def test_what_is_forgotten_is_on_no_disk(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    for name in ("a", "b"):
        memory.of(name)[0].add([1, 2, 3])
    memory.save()
    assert memory.forget("a")
    assert len(list(tmp_path.rglob("*.fds"))) == 1
    memory.close()
    assert restored(tmp_path, "a") == []
    assert restored(tmp_path, "b") == [[1, 2, 3]]
    # Without its store too.
    memory = open_memory(tmp_path)
    assert memory.forget("b") and not memory.forget("b")
    memory.close()
    assert not list(tmp_path.rglob("*.fds"))


# --- Faults ---


@pytest.mark.parametrize("damage", ["flipped", "short", "foreign"])
def test_damaged_files_are_left_out(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_memory(tmp_path)
    [store] = memory.of("tenant")
    for number in range(3):
        store.add([number] * 100)
        memory.save()
    memory.close()
    path = sorted(tmp_path.rglob("*.fds"))[1]
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[5000] ^= 1
    path.write_bytes({"short": content[:-1], "foreign": b"x" * 5000}.get(damage, content))
    assert restored(tmp_path) == [[0] * 100, [2] * 100]
    assert "saved text is left out" in caplog.text
    # The next save wrote one sound file in their place.
    assert len(list(tmp_path.rglob("*.fds"))) == 1
    assert restored(tmp_path) == [[0] * 100, [2] * 100]


def test_a_folder_that_cannot_be_written_costs_no_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_memory(tmp_path)
    [store] = memory.of("tenant")
    store.add([1, 2, 3])
    # A file stands where the namespace's folder should.
    MemoryFolder.folder_of(memory._saver._folder, "tenant").write_bytes(b"")  # type: ignore[union-attr]
    memory.save()
    memory.save()
    assert memory.faults >= 2
    assert caplog.text.count("the memory cannot be saved or read") == 1
    assert store.find([9, 1, 2])
    memory.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    with pytest.raises(DatastoreError, match="another process uses it"):
        MemoryFolder(tmp_path, key=KEY)
    memory.close()
    MemoryFolder(tmp_path, key=KEY).close()


def test_what_a_folder_refuses(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="key must have at least 16 bytes, got 5"):
        MemoryFolder(tmp_path, key="short")
    with pytest.raises(InvalidValueError, match="interval must be greater than 0, got 0"):
        MemoryFolder(tmp_path, key=KEY, interval=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatastoreError, match="cannot use the folder"):
        MemoryFolder(tmp_path / "file" / "folder", key=KEY)


# --- Documents of one store in another ---


def test_all_documents_of_a_store_are_added(tmp_path: Path) -> None:
    source, target = Datastore(max_bytes=1 << 20), Datastore(max_bytes=1 << 20)
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
        target.add_all(Datastore.open(tmp_path / name))
    for text in (chat[:50], chat[:120], chat[:180], [7] * 20, [8]):
        for a, b in zip(source.find(text), target.find(text), strict=True):
            assert (a.length, a.output) == (b.length, b.output)
            assert source.read(a.next, 20).tolist() == target.read(b.next, 20).tolist()
    assert len(source) == len(target)
    with pytest.raises(InvalidValueError, match="source must be another datastore"):
        target.add_all(target)
    with pytest.raises(DatastoreError, match="a frozen datastore takes no more text"):
        Datastore.open(tmp_path / "new.fds").add_all(target)
