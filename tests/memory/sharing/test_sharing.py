"""A fleet: what one replica says the others draft, whoever fails, and nobody else reads it."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaotic_fleet import check_chaos
from fastdraft import Datastore, Engine, Memory
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.memory.sharing import Objects, Replica
from fastdraft.memory.sharing import objects as objects_module
from fleets import KEY, contents, folder_of, holds, join, publish, read, say, texts
from random_cases import cases


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "_PAUSE", 0)


def forget(url: str, namespace: Any) -> bool:
    group, _, name = folder_of(url, namespace).partition("/")
    return Objects(url, KEY).forget(group, name)


def before_each(patch: pytest.MonkeyPatch, act: Callable[[str, str], None], *methods: str) -> None:
    """Calls `act` with the method and the path before each call of the store."""

    def wrapped(method: str) -> Callable[..., Any]:
        whole = getattr(Objects, method)

        def called(self: Objects, path: str = "", *args: Any, **options: Any) -> Any:
            act(method, path)
            return whole(self, path, *args, **options)

        return called

    for method in methods:
        patch.setattr(Objects, method, wrapped(method))


# --- Sharing ---


def test_text_of_one_replica_is_drafted_by_another(url: str) -> None:
    one, other = join(url), join(url)
    engine = Engine()
    request = engine.add_request([1, 2, 3], datastores=one.memory.of("tenant"))
    engine.observe(request, [4, 5, 6])
    engine.finish(request)
    assert one.refresh()
    assert other.find(["tenant"]) == []  # it is read now
    assert other.refresh()
    [store] = other.find(["tenant"])
    assert one.published_tokens == 6 and other.bytes == store.bytes
    # That a model wrote it is known too.
    assert [found.output for found in store.find([9, 3, 4])] == [True]
    assert [found.output for found in store.find([9, 1])] == [False]
    request = engine.add_request([9, 3, 4], read_only=other.find(["tenant"]))
    assert engine.propose(request, token_cost=0).tolist() == [5, 6]
    assert other.find(["another"]) == [] and one.find(["tenant"]) == []
    # Its own text is in its live stores.
    assert one.refresh() and one.find(["tenant"]) == []
    for replica in (one, other):
        replica.close()
        assert not replica.faults


# Names of different tenants, however alike.
NAMES: list[Any] = ["a", ("a",), ("a", None), None]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["say", "look", "ask", "restart"]),
            st.integers(0, 2),
            st.sampled_from(NAMES),
            st.integers(1, 60),
        ),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=60)
def test_published_documents_are_read_once_and_in_their_namespace_alone(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, Any, int]]
) -> None:
    url = str(tmp_path_factory.mktemp("fleet"))
    replicas = [join(url) for _ in range(3)]
    said: dict[Any, list[list[int]]] = {name: [] for name in NAMES}
    own = defaultdict[tuple[int, Any], list[list[int]]](list)
    number = 0
    for act, index, name, size in acts:
        replica = replicas[index]
        if act == "say":
            number += 1
            said[name].append([number] * size)
            own[index, name].append([number] * size)
            say(replica, name, [number] * size)
        elif act == "look":
            assert replica.refresh()
        elif act == "ask":
            replica.find([name])
        else:
            replica.close()
            replicas[index] = join(url)
            own |= {(index, each): [] for each in NAMES}
    for replica in replicas:
        assert replica.refresh()
    fresh = join(url)
    for name, documents in said.items():
        assert sorted(read(fresh, name)) == sorted(documents)
        # A replica that is at it reads what others said, each once, and perhaps its own.
        for index, replica in enumerate(replicas):
            found = read(replica, name)
            others = [each for each in documents if each not in own[index, name]]
            assert len(found) == len({each[0] for each in found})
            assert sorted(each for each in found if each in others) == sorted(others)
    for replica in (*replicas, fresh):
        replica.close()
        assert not replica.faults


def test_running_requests_keep_the_stores_that_they_began_with(tmp_path: Path) -> None:
    one, other, engine = join(str(tmp_path)), join(str(tmp_path)), Engine()
    say(one, "t", [1, 2, 3, 4, 5])
    one.refresh()
    assert read(other, "t") == [[1, 2, 3, 4, 5]]
    request = engine.add_request([9, 2, 3], read_only=other.find(["t"]))
    for number in range(12):
        say(one, "t", [7 + number] * 9)
        one.refresh()
        other.refresh()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]
    other.close()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]


def test_the_background_publishes_and_follows_by_itself(tmp_path: Path) -> None:
    url = str(tmp_path)
    one, other = join(url, interval=0.005), join(url, interval=0.005)
    number = 0
    while len(texts(other.find(["t"]))) <= 32:
        if one.published_tokens == 3 * number:
            number += 1
            say(one, "t", [number] * 3)
    one.close()
    other.close()
    assert not one.faults and not other.faults
    assert sorted(read(join(url), "t")) == [[n + 1] * 3 for n in range(number)]


def test_documents_are_read_in_their_order(tmp_path: Path) -> None:
    url = str(tmp_path)
    publish(url, "t", *([number] * 9 for number in range(3)))
    other = join(url)
    say(other, "t", [9] * 9)
    assert other.refresh()
    assert read(join(url), "t") == [[number] * 9 for number in (0, 1, 2, 9)]


def test_a_store_that_is_made_anew_is_published_from_its_beginning(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = publish(url, "t", [1] * 50)
    one.memory.forget("t")
    say(one, "t", [2] * 9)
    one.refresh()
    assert read(join(url), "t") == [[1] * 50, [2] * 9]


def test_a_replica_joins_its_own_objects_alone(url: str) -> None:
    one, other, reader = join(url), join(url), join(url)
    say(other, "t", [9999] * 9)
    other.refresh()
    [foreign] = contents(url).items()
    documents = [[number] * 9 for number in range(60)]
    objects, most = Objects(url, KEY), 0
    for number, document in enumerate(documents):
        say(one, "t", document)
        assert one.refresh()
        if number % 7 == 0:
            read(reader, "t")
        most = max(most, len(objects.ls(folder_of(url, "t"))))
    assert most <= 1 + 2 * 9 + 1
    assert foreign in contents(url).items()
    for found in (read(reader, "t"), read(join(url), "t")):
        assert sorted(found) == sorted([*documents, [9999] * 9])
    # It wrote each document some times, not sixty times.
    assert not one.faults and not reader.faults


@pytest.mark.parametrize("method", ["write", "read", "remove"])
@pytest.mark.parametrize("at", range(4))
def test_a_join_that_fails_or_is_killed_loses_nothing(
    method: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = join(url)
    join_objects, calls = Replica._join, iter(range(99))

    def fails(called: str, _: str) -> None:
        if called == method and next(calls) >= at:
            raise OSError("killed")

    def joins(self: Replica, space: Any) -> None:
        with monkeypatch.context() as patch:
            before_each(patch, fails, method)
            join_objects(self, space)

    monkeypatch.setattr(Replica, "_join", joins)
    documents = [[number] * 9 for number in range(12)]
    for document in documents:
        say(one, "t", document)
        one.refresh()
    # As those see it who come after it was killed, and those who see it go on.
    assert read(join(url), "t") == documents
    monkeypatch.undo()
    say(one, "t", [77] * 9)
    assert one.refresh()
    assert sorted(read(join(url), "t")) == sorted([*documents, [77] * 9])


def test_200_tenants_take_two_calls_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    one, calls = join(url), []
    before_each(monkeypatch, lambda method, _: calls.append(method), "ls", "read", "write")
    for number in range(200):
        say(one, number, [number] * 9)
    assert one.refresh()
    assert (calls.count("read"), calls.count("write"), calls.count("ls")) == (200, 200, 0)
    calls.clear()
    assert one.refresh() and not calls


# --- What fails ---


@cases(3)
@pytest.mark.filterwarnings("ignore")
def test_a_store_that_fails_in_all_ways_loses_nothing(seed: int) -> None:
    found = check_chaos(seed, 400)
    assert found["acknowledged"] and found["outages"]


def test_a_missing_bucket_costs_no_drafts(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    replica = join(f"{bucket}-missing/fleet")
    say(replica, "t", [1, 2, 3])
    assert not replica.refresh() and not replica.refresh()
    assert replica.faults["publish"] >= 2 and replica.published_tokens == 0
    assert caplog.text.count("cannot publish the fleet's memory") == 1
    assert replica.find(["t"]) == []
    # It comes, and nothing is lost.
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(f"{bucket}-missing")
    assert replica.refresh() and replica.published_tokens == 3
    replica.close()


def test_text_that_cannot_be_published_in_time_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    replica = join(url, memory_bytes=200_000)

    def no_space(*_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before_each(monkeypatch, no_space, "write")
    for number in range(40):
        say(replica, "t", list(range(number * 1000, (number + 1) * 1000)))
        assert not replica.refresh()
    monkeypatch.undo()
    assert replica.refresh()
    assert replica.dropped_tokens > 20_000
    # Marks of documents that are dropped count as tokens.
    assert abs(replica.published_tokens + replica.dropped_tokens - 40_000) <= 40
    assert read(join(url), "t")[-1] == list(range(39_000, 40_000))
    replica.close()


def test_text_that_leaves_while_it_is_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = join(str(tmp_path), memory_bytes=200_000)
    say(replica, "t", list(range(1000)))
    dump = Datastore._dump

    def late(store: Datastore, position: int, most: int) -> tuple[bytes, int]:
        monkeypatch.undo()
        for number in range(1, 40):
            say(replica, "t", list(range(number * 1000, (number + 1) * 1000)))
        return dump(store, position, most)

    monkeypatch.setattr(Datastore, "_dump", late)
    assert replica.refresh()
    assert replica.dropped_tokens > 20_000
    assert abs(replica.published_tokens + replica.dropped_tokens - 40_000) <= 40
    replica.close()


def test_a_lost_answer_publishes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one, write = join(url), Objects.write

    def lost(self: Objects, path: str, content: bytes) -> None:
        write(self, path, content)
        raise OSError("the answer is lost")

    monkeypatch.setattr(Objects, "write", lost)
    say(one, "t", [1] * 9)
    assert not one.refresh()
    say(one, "t", [2] * 9)  # while nobody knows what became of the first
    assert not one.refresh()
    monkeypatch.undo()
    assert one.refresh()
    assert read(join(url), "t") == [[1] * 9, [2] * 9]
    assert one.published_tokens == 18


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "text": lambda content, _: flip(content, len(content) - 9),
    "size": lambda content, _: flip(content, 24),
    "tombstone": lambda content, _: flip(content, 8),
    "format": lambda content, _: flip(content, 6),
    "short": lambda content, _: content[:-20],
    "within the head": lambda content, _: content[:50],
    "empty": lambda *_: b"",
    "foreign": lambda *_: b"x" * 9000,
    "another's": lambda _, other: other,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_costs_its_own_text_alone_and_mends(url: str, damage: str) -> None:
    publish(url, "t", *([number] * 9 for number in range(3)))
    reader, objects = join(url), Objects(url, KEY)
    names = sorted(objects.ls(folder_of(url, "t")), key=lambda name: int(name[33:]))
    paths = [f"{folder_of(url, 't')}/{name}" for name in names]
    whole = contents(url)
    objects.write(paths[1], DAMAGES[damage](whole[paths[1]], whole[paths[2]]))
    assert read(reader, "t") == read(join(url), "t") == [[0] * 9, [2] * 9]
    assert reader.faults["follow"]
    # One that was only not there as a whole yet is read when it is.
    objects.write(paths[1], whole[paths[1]])
    assert sorted(read(reader, "t")) == [[number] * 9 for number in range(3)]


def test_junk_in_any_folder_and_of_any_size_stops_nobody(tmp_path: Path) -> None:
    """Nothing is derived from a name, or read at length, before a MAC was checked."""
    url = str(tmp_path)
    one = publish(url, "t", [1] * 9)
    folder = tmp_path / folder_of(url, "t")
    names = ["f" * 32 + "-" + "9" * 20, "0", "\N{SNOWMAN}", one._name + "-99999999", "a-b-c", "-"]
    for name in names:
        for parent in (folder, folder.parent, tmp_path):
            (parent / name).write_bytes(b"x")
    with (folder / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    read_bytes = 0
    part = Objects._part

    def counted(self: Objects, path: str, first: int, last: int) -> bytes:
        nonlocal read_bytes
        content = part(self, path, first, last)
        read_bytes += len(content)
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "_part", counted)
        reader = join(url)
        assert read(reader, "t") == [[1] * 9]
    assert read_bytes < 10 * (1 << 16)
    say(one, "t", [2] * 9)
    assert one.refresh()
    assert read(reader, "t") == [[1] * 9, [2] * 9]
    assert one.published_tokens == 18 and reader.faults["follow"]
    assert all((folder / name).exists() for name in names)  # nor is it removed


def test_a_fifo_and_a_link_in_the_folder_stop_nobody(tmp_path: Path) -> None:
    """Nobody writes to the FIFO: whoever opened it as a file would wait for ever."""
    url = str(tmp_path)
    publish(url, "t", [1] * 9)
    folder = tmp_path / folder_of(url, "t")
    [text] = folder.iterdir()
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(text)
    found: Future[list[list[int]]] = Future()
    work = threading.Thread(target=lambda: found.set_result(read(join(url), "t")), daemon=True)
    work.start()
    assert found.result(60) == [[1] * 9]


# --- Three processes, one killed ---

PROCESS = f"""
import sys
from fastdraft import Memory
from fastdraft.memory.sharing import Replica

memory = Memory(8 << 20)
replica = Replica(memory, sys.argv[1], key={KEY!r}, model="model", interval=0.02)
first = int(sys.argv[2])
for number in range(first, first + int(sys.argv[3])):
    memory.of("tenant")[0].add([number] * 40)
    if replica.refresh():
        print(number, flush=True)
replica.close()
print("end", flush=True)
"""


@pytest.mark.parametrize("where", ["file", "s3"])
def test_a_killed_replica_loses_nothing_that_was_acknowledged(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if where == "file" else f"{request.getfixturevalue('bucket')}/fleet"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, url, str(first), count],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for first, count in ((0, "20"), (1000, "20"), (2000, "1000000"))
    ]
    killed = processes[2]
    assert killed.stdout is not None
    said = [int(killed.stdout.readline()) for _ in range(5)]
    killed.send_signal(signal.SIGKILL)
    said += [int(line) for line in killed.stdout if line.endswith("\n")]
    for process in processes[:2]:
        output, _ = process.communicate()
        lines = output.split()
        assert lines.pop() == "end"
        said += map(int, lines)
    killed.wait()
    killed.stdout.close()
    assert len(said) >= 45
    numbers = [document[0] for document in read(join(url), "tenant")]
    assert set(said) <= set(numbers)
    assert len(numbers) == len(set(numbers))


def test_a_fork_does_not_wait_for_a_lock_that_a_thread_held(tmp_path: Path) -> None:
    one = publish(str(tmp_path), "t", [1] * 9)
    with one._lock, one._turn:
        child = os.fork()
        if child == 0:
            os._exit(one.find(["t"]) != [] or one.refresh())
    _, status = os.waitpid(child, 0)
    assert status == 0
    say(one, "t", [2] * 9)
    assert one.refresh()
    assert len(contents(str(tmp_path))) == 2  # the child published nothing
    one.close()


# --- Forgetting ---

SECRET = list(range(60_000, 60_100))


def found_secret(url: str) -> bool:
    return any(holds(content, SECRET) for content in contents(url).values())


def test_a_forgotten_text_is_nowhere_and_the_next_one_is_kept(url: str) -> None:
    one, other = join(url), join(url)
    for replica in (one, other):
        say(replica, "secret", SECRET)
        say(replica, "t", [1] * 9)
        assert replica.refresh()
    assert read(other, "secret") == [SECRET]
    assert found_secret(url)
    assert forget(url, "secret")
    assert not found_secret(url)
    assert read(join(url), "secret") == []
    # Those that had not looked yet bring nothing back, not even what they had not published.
    say(one, "secret", SECRET[:50])
    for replica in (one, other):
        assert read(replica, "secret") == []
        assert replica.memory.find(["secret"]) == [] and replica.memory.find(["t"])
    assert not found_secret(url)
    say(one, "secret", [5] * 9)
    assert one.refresh()
    assert read(other, "secret") == read(join(url), "secret") == [[5] * 9]


def test_a_name_of_which_nothing_is_published_is_not_forgotten(url: str) -> None:
    publish(url, "t", [1] * 9)
    before = contents(url)
    assert not forget(url, "tt")
    assert contents(url) == before


def test_forgetting_raises_where_anything_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    publish(url, "secret", SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "remove", lambda *_: None)
        with pytest.raises(DatastoreError, match="1 objects of the namespace are there still"):
            forget(url, "secret")

    def no_removal(*_: str) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        before_each(patch, no_removal, "remove")
        with pytest.raises(OSError, match="no"):
            forget(url, "secret")
    # The object that stays is not read any more.
    assert found_secret(url)
    assert read(join(url), "secret") == []
    assert forget(url, "secret")
    assert not found_secret(url)


def test_text_written_while_it_was_forgotten_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = publish(url, "secret", [1] * 9)
    say(one, "secret", SECRET)
    write = Objects.write

    def late(self: Objects, path: str, content: bytes) -> None:
        monkeypatch.undo()
        forget(url, "secret")  # after the replica had looked for a tombstone
        write(self, path, content)

    monkeypatch.setattr(Objects, "write", late)
    assert one.refresh()
    assert read(join(url), "secret") == []
    one.find(["secret"])
    assert one.refresh()
    assert not found_secret(url) and one.memory.find(["secret"]) == []


def test_a_tombstone_that_cannot_be_verified_stops_its_namespace_alone(tmp_path: Path) -> None:
    """Whoever read past it might serve what was forgotten."""
    url = str(tmp_path)
    one = join(url)
    for name in ("secret", "t"):
        say(one, name, SECRET)
    one.refresh()
    forget(url, "secret")
    path = tmp_path / folder_of(url, "secret") / "forgotten"
    path.write_bytes(flip(path.read_bytes(), 60))
    reader = join(url)
    for name in ("secret", "t"):
        say(one, name, [7] * 9)
    assert not one.refresh()
    reader.find(["secret", "t"])
    assert not reader.refresh()
    assert one.faults["publish"] and texts(reader.find(["t"])) == [SECRET, [7] * 9]
    assert forget(url, "secret")
    assert one.refresh() and reader.refresh()


def test_a_replica_whose_objects_are_gone_drops_their_namespace(url: str) -> None:
    one = join(url)
    for name in ("secret", "t"):
        say(one, name, SECRET)
    one.refresh()
    objects = Objects(url, KEY)
    for name in objects.ls(folder_of(url, "secret")):
        objects.remove(f"{folder_of(url, 'secret')}/{name}")
    say(one, "secret", [*SECRET, 1])
    assert one.refresh()
    assert one.memory.find(["secret"]) == [] and one.memory.find(["t"])
    assert read(join(url), "secret") == []


# --- Who reads what ---


def test_names_are_in_no_file_and_modes_are_the_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one = join(str(tmp_path / "fleet"), model="secret-model")
        say(one, ("secret-adapter", "secret-salt"), [1, 2, 3])
        one.refresh()
    finally:
        os.umask(before)
    paths = list((tmp_path / "fleet").rglob("*"))
    assert len(paths) == 3
    for path in paths:
        assert "secret" not in str(path.relative_to(tmp_path))
        assert b"secret" not in (path.read_bytes() if path.is_file() else b"")
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_names_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    objects = Objects(str(tmp_path), KEY)
    names: list[Any] = [None, "None", "null", 1, "1", True, ("1",), (1,), ("a", "b"), ("a,b",)]
    names += [b"a", "a", ("a", None)]
    assert len({objects.id_of("group", name) for name in names}) == len(names)
    with pytest.raises(InvalidValueError, match="a namespace that is shared must be a text"):
        objects.id_of("group", 1.5)
    one = join(str(tmp_path))
    say(one, 1.5, [1] * 9)
    assert one.find([1.5]) == [] and one.refresh() and not contents(str(tmp_path))
    # Names that are equal but of another type have folders of their own, in tuples too.
    alike = [1, True, ("t", 1), ("t", True)]
    for number, name in enumerate(alike):
        say(one, name, [number] * 9)
    assert one.refresh() and len(contents(str(tmp_path))) == len(alike)
    other = join(str(tmp_path))
    other.find(alike)
    assert other.refresh()
    assert texts(other.find(alike)) == [[number] * 9 for number in range(len(alike))]


@pytest.mark.parametrize(
    "options", [{"key": b"another operator"}, {"model": "other"}, {"fingerprint": bytes(32)}]
)
def test_another_key_model_or_tokenizer_shares_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    url = str(tmp_path)
    one, other = join(url), join(url, **options)
    say(one, "t", [1, 2, 3])
    one.refresh()
    before = contents(url)
    for number in range(40):
        say(other, "t", [number])
        assert other.refresh()
    assert [1, 2, 3] not in read(other, "t")
    # Nor is anything of it touched.
    assert before.items() <= contents(url).items()
    assert read(join(url), "t") == [[1, 2, 3]]


def test_text_of_others_keeps_to_the_memory(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url, memory_bytes=64 << 20)
    for name in "abc":
        for number in range(10):
            say(one, name, list(range(number * 10_000, number * 10_000 + 10_000)))
            one.refresh()
    other = join(url, memory_bytes=2 << 20)
    for _ in range(3):
        for name in "abc":
            found = read(other, name)
            assert not found or found[-1][-1] == 99_999  # the newest
        assert other.memory.bytes <= other.memory.max_bytes
        assert other.bytes <= other.memory.bytes
    assert read(other, "c") and not other.faults
    # Its own text has room too.
    say(other, "own", list(range(5000)))
    assert texts(other.memory.find(["own"])) == [list(range(5000))]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    memory = Memory(1 << 20)
    with pytest.raises(InvalidValueError, match="key must have at least 16 bytes, got 5"):
        Replica(memory, str(tmp_path), key="short")
    with pytest.raises(InvalidValueError, match="interval must be greater than 0, got 0"):
        Replica(memory, str(tmp_path), key=KEY, interval=0)
    with pytest.raises(InvalidValueError, match="cannot use the URL 'nosuch://x'"):
        Replica(memory, "nosuch://x", key=KEY)
