"""A fleet: what one replica says the others draft, whoever fails, and nobody else reads it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, Engine, Memory
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.fleet import Manifest, Published, Replica, groups
from fastdraft.fleet.objects import LocalObjects, Objects, RemoteObjects
from fastdraft.fleet.published import Pack
from fastdraft.fleet.sealed import Chunk, digest, frame
from fleets import KEY, contents, holds, join, only, read, say, texts


def pipe(url: str, name: str, content: bytes) -> None:
    """Writes an object of the one model, in place of the one there."""
    objects = Objects(url)
    objects.remove(f"{only(url).group}/{name}")
    assert objects.write(f"{only(url).group}/{name}", content)


def content_of(url: str, name: str) -> bytes:
    found: bytes = contents(url)[f"{only(url).group}/{name}"]
    return found


def newest(url: str) -> Manifest:
    return only(url).latest()


def published_texts(url: str) -> list[Pack]:
    return [pack for pack in only(url).current(newest(url)) if pack.replica]


def before_each(patch: pytest.MonkeyPatch, act: Callable[[str], None], *methods: str) -> None:
    """Calls `act` with the method's name before each call of a local store."""

    def wrapped(method: str) -> Callable[..., Any]:
        whole = getattr(LocalObjects, method)

        def called(self: LocalObjects, *args: Any) -> Any:
            act(method)
            return whole(self, *args)

        return called

    for method in methods:
        patch.setattr(LocalObjects, method, wrapped(method))


# --- Sharing ---


def test_what_one_replica_said_another_drafts(url: str) -> None:
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


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["say", "look", "ask", "join", "restart"]),
            st.integers(0, 2),
            st.sampled_from("ab"),
            st.integers(1, 60),
        ),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=60)
def test_what_was_published_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, str, int]]
) -> None:
    url = str(tmp_path_factory.mktemp("fleet"))
    replicas = [join(url) for _ in range(3)]
    said: dict[str, list[list[int]]] = {"a": [], "b": []}
    own = defaultdict[tuple[int, str], list[list[int]]](list)
    number = 0
    for act, place, name, size in acts:
        replica = replicas[place]
        if act == "say":
            number += 1
            said[name].append([number] * size)
            own[place, name].append([number] * size)
            say(replica, name, [number] * size)
        elif act == "look":
            assert replica.refresh()
        elif act == "ask":
            replica.find([name])
        elif act == "restart":
            replica.close()
            replicas[place] = join(url)
            own[place, "a"] = own[place, "b"] = []
        elif published := groups_of(url):
            published[0].join()
    for replica in (*replicas, *replicas):
        assert replica.refresh()
    fresh = join(url)
    for name, documents in said.items():
        assert sorted(read(fresh, name)) == sorted(documents)
        # A replica that is at it reads what others said, each once, and perhaps its own.
        for place, replica in enumerate(replicas):
            found = read(replica, name)
            others = [each for each in documents if each not in own[place, name]]
            assert len(found) == len({each[0] for each in found})
            assert sorted(each for each in found if each in others) == sorted(others)
    for replica in (*replicas, fresh):
        replica.close()
        assert not replica.faults


def groups_of(url: str) -> list[Published]:
    with contextlib.suppress(InvalidValueError):
        return groups(Objects(url), KEY)
    return []


def test_running_requests_keep_the_stores_that_they_began_with(tmp_path: Path) -> None:
    one, other, engine = join(str(tmp_path)), join(str(tmp_path)), Engine()
    say(one, "t", [1, 2, 3, 4, 5])
    one.refresh()
    assert read(other, "t") == [[1, 2, 3, 4, 5]]
    request = engine.add_request([9, 2, 3], read_only=other.find(["t"]))
    for number in range(3):
        say(one, "t", [7 + number] * 9)
        one.refresh()
        only(str(tmp_path)).join()
        other.refresh()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]
    other.close()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]


def test_the_background_publishes_follows_and_joins_by_itself(tmp_path: Path) -> None:
    url = str(tmp_path)
    one, other = join(url, interval=0.005), join(url, interval=0.005)
    number = 0
    while not other.manifest.number or len(texts(other.find(["t"]))) <= 32:
        if one.published_tokens == 3 * number:
            number += 1
            say(one, "t", [number] * 3)
    one.close()
    other.close()
    assert not one.faults and not other.faults
    assert sorted(read(join(url), "t")) == [[n + 1] * 3 for n in range(number)]


def test_what_was_said_later_comes_later(tmp_path: Path) -> None:
    """Though its replica has published less."""
    url = str(tmp_path)
    one, other = join(url), join(url)
    for number in range(3):
        say(one, "t", [number] * 9)
        one.refresh()
    assert other.refresh()
    say(other, "t", [9] * 9)
    assert other.refresh()
    assert read(join(url), "t") == [[number] * 9 for number in (0, 1, 2, 9)]


def test_a_store_that_is_made_anew_is_published_from_its_beginning(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url)
    say(one, "t", [1] * 50)
    one.refresh()
    one.memory.forget("t")
    say(one, "t", [2] * 9)
    one.refresh()
    assert read(join(url), "t") == [[1] * 50, [2] * 9]


# --- Joining ---


def test_objects_are_few_and_what_was_joined_goes(url: str) -> None:
    one, other = join(url), join(url)
    documents = [[number] * 700 for number in range(40)]
    read(other, "t")
    for number, document in enumerate(documents):
        say(one, "t", document)
        one.refresh()
        if number % 2:
            manifest = only(url).join()
            assert len(manifest.packs) <= 3
        assert len(read(other, "t")) == number + 1
    assert read(other, "t") == documents == read(join(url), "t")
    counts = Counter(name.split("/")[1] for name in contents(url))
    assert counts["manifests"] <= 8
    # Those of the last manifests.
    assert counts["text"] <= 2 * 9 and counts["packs"] <= 9 + 3
    assert not other.faults


def test_one_replica_joins_when_there_is_much(tmp_path: Path) -> None:
    url = str(tmp_path)
    replicas = [join(url) for _ in range(4)]
    for number in range(40):
        say(replicas[0], "t", [number] * 9)
        for replica in replicas:
            assert replica.refresh()
    assert newest(url).number == 1
    assert len(published_texts(url)) < 32
    assert not any(replica.faults for replica in replicas)


def test_the_oldest_text_leaves_when_there_is_too_much(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url, memory_bytes=64 << 20)
    chance = np.random.default_rng(0)
    say(one, "pinned", [7] * 9)
    one.refresh()
    published = only(url)
    name = published.id_of("pinned")
    assert published.pin([name]).pinned == {name}
    for number in range(60):
        say(one, "t", [number, *chance.integers(0, 2**22 - 2, 20_000)])
        one.refresh()
        assert published.join(2 << 20).bytes <= 2 << 20
    reader = join(url, memory_bytes=64 << 20)
    found = read(reader, "t")
    first = [document[0] for document in found]
    assert first == list(range(first[0], 60)) and 10 < len(first) < 40
    assert read(reader, "pinned") == [[7] * 9]
    assert 0 < published.join(1).bytes < 500
    assert not published.pin([name], pinned=False).pinned
    assert published.join(1).bytes == 0


def test_200_tenants_are_published_and_read_in_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than .2 s at 20 ms a call."""
    url = str(tmp_path)
    one, other = join(url, memory_bytes=64 << 20), join(url, memory_bytes=64 << 20)
    calls = Counter[str]()
    before_each(monkeypatch, lambda name: calls.update([name]), "ls", "read", "write", "remove")
    tenants = [f"tenant {number}" for number in range(200)]
    other.find(tenants)
    other.refresh()
    for number, tenant in enumerate(tenants):
        say(one, tenant, [number] * 500)
    calls.clear()
    assert one.refresh()
    assert sum(calls.values()) < 10 and calls["write"] == 1
    calls.clear()
    assert other.refresh()
    assert sum(calls.values()) < 10
    assert [texts(other.find([tenant])) for tenant in tenants] == [
        [[number] * 500] for number in range(200)
    ]
    calls.clear()
    only(url).join()
    assert sum(calls.values()) < 20


def test_200_000_namespaces_open(tmp_path: Path) -> None:
    published = Published(Objects(tmp_path), KEY, digest(KEY, "fleet", "model", None))
    live = Datastore(max_bytes=1 << 20)
    live.add([1, 2, 3])
    chunk = Chunk(frame(live._dump(0, 100)[0]), 4)
    names = {secrets.token_hex(32) for _ in range(100_000)}
    mine = published.id_of("t")
    published.put_text("0" * 16, 0, 0, dict.fromkeys(names, chunk))
    names = {secrets.token_hex(32) for _ in range(100_000)}
    published.put_text("0" * 16, 1, 0, dict.fromkeys(names | {mine}, chunk))
    manifest = published.join()
    assert read(join(str(tmp_path)), "t") == [[1, 2, 3]]
    head = published.head(manifest.packs[0])
    assert head is not None and len(head.index) == 200_001
    # The manifest does not grow with them.
    assert len(content_of(str(tmp_path), f"manifests/{1:020d}")) < 2000


# --- Several processes that join, and killed ones ---


def test_joins_at_once_lose_nothing(url: str) -> None:
    one = join(url)
    say(one, "a", [0] * 50)
    one.refresh()
    done = threading.Event()

    def work() -> None:
        published = only(url)
        while not done.is_set():
            with contextlib.suppress(DatastoreError):  # the others were first
                published.join()

    documents = [[number] * 50 for number in range(12)]
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(work) for _ in range(3)]
        for number, document in enumerate(documents[1:], 1):
            say(one, "ab"[number % 2], document)
            assert one.refresh()
        done.set()
    assert not any(each.exception() for each in joining)
    only(url).join()
    other = join(url)
    for name in "ab":
        assert sorted(read(other, name)) == [
            d for i, d in enumerate(documents) if "ab"[i % 2] == name
        ]


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("step", range(16))
def test_a_join_killed_at_any_step_loses_nothing(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = join(url)
    documents = [[number] * 50 for number in range(30)]
    for document in documents[:27]:
        say(one, "t", document)
        one.refresh()
        only(url).join()
    for document in documents[27:]:
        say(one, "t", document)
        one.refresh()
    left = step

    def act(_: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped

    with monkeypatch.context() as patch, contextlib.suppress(Stopped):
        before_each(patch, act, "write", "remove")
        only(url).join()
    for _ in range(10):
        assert read(join(url), "t") == documents
        only(url).join()
        say(one, "other", [step] * 9)
        one.refresh()
    # What it left goes too.
    manifest = only(url).latest()
    packs = {name.partition("/")[2] for name in contents(url) if "/packs/" in name}
    assert packs <= {pack.name for pack in manifest.packs} | manifest.gone.keys()


def test_where_no_write_is_exclusive_the_last_manifest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow process writes over another's manifest, and nothing is lost."""
    url = f"memory://{tmp_path}"
    one = join(url)
    say(one, "t", [1] * 9)
    one.refresh()

    def overwrite(self: RemoteObjects, name: str, content: bytes) -> bool:
        self._files.pipe_file(f"{self._root}/{name}", content)
        return True

    monkeypatch.setattr(RemoteObjects, "write", overwrite)
    slow = only(url)
    write = Published._write

    def late(self: Published, manifest: Manifest) -> bool:
        monkeypatch.setattr(Published, "_write", write)
        say(one, "t", [2] * 9)
        one.refresh()
        only(url).join()
        return write(self, manifest)

    monkeypatch.setattr(Published, "_write", late)
    slow.join()
    assert sorted(read(join(url), "t")) == [[1] * 9, [2] * 9]
    only(url).join()
    assert sorted(read(join(url), "t")) == [[1] * 9, [2] * 9]


def test_a_change_that_another_process_came_before_is_made_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = join(url)
    say(one, "t", [1] * 9)
    one.refresh()
    write = Published._write

    def late(self: Published, manifest: Manifest) -> bool:
        monkeypatch.setattr(Published, "_write", write)
        only(url).pin(["b" * 64])
        return write(self, manifest)

    monkeypatch.setattr(Published, "_write", late)
    only(url).pin(["a" * 64])
    assert newest(url).pinned == {"a" * 64, "b" * 64}


# --- Failing stores and disks ---


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


def test_what_cannot_be_published_in_time_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    replica = join(url, memory_bytes=200_000)

    def no_space(_: str) -> None:
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


# --- Damage ---


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


Damage = Callable[[bytes, bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "text": lambda content, _: flip(content),
    "entries": lambda content, _: content[:60] + bytes([content[60] ^ 1]) + content[61:],
    "head": lambda content, _: b"x" + content[1:],
    "short": lambda content, _: content[:-20],
    "empty": lambda *_: b"",
    "foreign": lambda *_: b"x" * 9000,
    "many entries": lambda content, _: b"fastdraft memory 1\n" + b"9" * 30 + content,
    "another's": lambda _, other: other,
}


@pytest.mark.parametrize(
    ("url", "damage", "joined"),
    [
        *(("file", damage, joined) for damage in DAMAGES for joined in (False, True)),
        *((other, "short", True) for other in ("memory", "s3")),
    ],
    indirect=["url"],
)
def test_damage_costs_its_own_text_alone(url: str, damage: str, joined: bool) -> None:
    one, follower = join(url), join(url)
    read(follower, "a")
    say(one, "a", [1] * 9)
    one.refresh()
    if joined:
        only(url).join()
    [name] = [name for name in contents(url) if ("packs" if joined else "text") in name]
    name = name.partition("/")[2]
    sound = content_of(url, name)
    for tokens in ([3] * 9, [4] * 900):
        say(one, "a", tokens)
        say(one, "b", tokens)
        one.refresh()
    other = content_of(url, published_texts(url)[-1].name)
    pipe(url, name, DAMAGES[damage](sound, other))
    expected = [[3] * 9, [4] * 900]
    for _ in range(2):
        reader = join(url)
        assert read(reader, "a") == expected and read(reader, "b") == expected
        # It reads the objects that were merged into the pack.
        assert read(follower, "a") == [[1] * 9] * joined + expected
        assert not follower.faults["publish"]
        # It is left out by whoever joins, and stays.
        published = only(url)
        number = published.join().number
        assert published.join().number == number
    assert content_of(url, name) == DAMAGES[damage](sound, other)
    # A later process may be able to read it.
    pipe(url, name, sound)
    assert sorted(read(join(url), "a")) == [[1] * 9, *expected]
    only(url).join()
    assert sorted(read(join(url), "a")) == [[1] * 9, *expected]


def test_a_damaged_object_is_read_twice_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = join(url)
    for number in range(2):
        say(one, "t", [number] * 9)
        one.refresh()
    group = only(url).group
    pack, _ = published_texts(url)
    pipe(url, pack.name, DAMAGES["head"](content_of(url, pack.name), b""))
    published = Published(Objects(url), KEY, group)
    calls: list[str] = []
    before_each(monkeypatch, calls.append, "read")
    for _ in range(3):
        assert published.head(pack) is None
    assert len(calls) == 2 and published.left_out == {pack.name}


@pytest.mark.parametrize("how", ["changed", "short", "refused"])
@pytest.mark.parametrize("step", range(12))
def test_one_wrong_read_loses_nothing(
    tmp_path: Path, step: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a join, or of a replica that looks. Nor is anything read twice."""
    url = str(tmp_path)
    one, follower = join(url), join(url)
    read(follower, "t")
    # Too short for a store to know them again.
    documents = [[number] * 9 for number in range(9)]
    for number, document in enumerate(documents):
        say(one, "t", document)
        one.refresh()
        if number in (3, 5):
            only(url).join()
    whole, reads = LocalObjects.read, 0

    def wrong(self: LocalObjects, name: str, first: int, last: int) -> bytes:
        nonlocal reads
        content = whole(self, name, first, last)
        reads += 1
        if reads - 1 != step:
            return content
        if how == "refused":
            raise OSError(errno.EIO, "Input/output error")
        return content[:-10] if how == "short" else flip(content)

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "read", wrong)
        with contextlib.suppress(DatastoreError, OSError):
            only(url).join()
        reads = 0
        assert follower.refresh() or how == "refused"
    only(url).join()
    assert read(join(url), "t") == documents
    assert read(follower, "t") == documents


def test_what_is_gone_costs_its_own_text_alone(tmp_path: Path) -> None:
    """Somebody removed a pack from the bucket."""
    url = str(tmp_path)
    one, follower = join(url), join(url)
    read(follower, "t")
    say(one, "t", [1] * 9)
    one.refresh()
    only(url).join()
    (pack,) = newest(url).packs
    Objects(url).remove(f"{only(url).group}/{pack.name}")
    say(one, "t", [2] * 9)
    one.refresh()
    reader = join(url)
    for replica in (reader, follower):
        replica.find(["t"])
        for _ in range(3):
            replica.refresh()
        assert [2] * 9 in texts(replica.find(["t"]))
    only(url).join()
    assert read(join(url), "t") in ([[2] * 9], [])
    say(one, "t", [3] * 9)
    one.refresh()
    assert [3] * 9 in read(follower, "t")


def test_a_replica_that_slept_reads_all_anew(tmp_path: Path) -> None:
    url = str(tmp_path)
    one, sleeper = join(url), join(url)
    documents = [[number] * 50 for number in range(40)]
    for number, document in enumerate(documents):
        say(one, "t", document)
        one.refresh()
        if number == 2:
            assert read(sleeper, "t") == documents[:3]
        if number > 2:
            only(url).join()
    sleeper.refresh()
    assert read(sleeper, "t") == documents
    assert not sleeper.faults


# --- Three processes, one killed ---

PROCESS = f"""
import sys
from fastdraft import Memory
from fastdraft.fleet import Replica

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
    only(url).join()
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
    for _ in range(2):
        numbers = [document[0] for document in read(join(url), "tenant")]
        assert set(said) <= set(numbers)
        assert len(numbers) == len(set(numbers))
        # Of each replica in the order in which it was said.
        for first in (0, 1000, 2000):
            own = [number for number in numbers if first <= number < first + 1000]
            assert own == sorted(own)
        only(url).join()


KILLED = f"""
import os, sys
from fastdraft import Memory
from fastdraft.fleet import Replica

memory = Memory(8 << 20)
memory.of("tenant")[0].add([1, 2, 3])
os.link = lambda *_: os.kill(os.getpid(), 9)
Replica(memory, sys.argv[1], key={KEY!r}, model="model").refresh()
"""


def test_only_what_a_killed_replica_was_writing_is_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert len(list(tmp_path.glob("*/begun-*/*"))) == 1
    strange = [tmp_path / "somebody.tmp", tmp_path / "begun-x" / "file"]
    replica = join(str(tmp_path))
    say(replica, "tenant", [4, 5, 6])
    assert replica.refresh()
    strange += [tmp_path / only(str(tmp_path)).group / folder / "a.tmp" for folder in ("", "text")]
    for path in strange:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody's")
    only(str(tmp_path)).join()
    assert not list((tmp_path / only(str(tmp_path)).group).glob("begun-*"))
    assert all(path.exists() for path in strange)
    assert read(join(str(tmp_path)), "tenant") == [[4, 5, 6]]


def test_a_fifo_and_a_link_in_the_folder_stop_nobody(tmp_path: Path) -> None:
    """Nobody writes to the FIFO: whoever opened it as a file would wait for ever."""
    url = str(tmp_path)
    one = join(url)
    say(one, "t", [1] * 9)
    one.refresh()
    (text,) = published_texts(url)
    folder = tmp_path / only(url).group
    os.mkfifo(folder / text.name.replace("-00", "-01"))
    (folder / text.name.replace("-00", "-02")).symlink_to(folder / text.name)
    os.mkfifo(folder / f"manifests/{5:020d}") if (folder / "manifests").mkdir() is None else None

    def work() -> list[list[int]]:
        only(url).join()
        return read(join(url), "t")

    found: Future[list[list[int]]] = Future()
    threading.Thread(target=lambda: found.set_result(work()), daemon=True).start()
    assert found.result(60) == [[1] * 9]
    with pytest.raises(DatastoreError, match="is no file"):
        Objects(url).read(f"{only(url).group}/manifests/{5:020d}", 0, 9)


# --- Forgetting ---

SECRET = list(range(60_000, 60_100))


def found_secret(url: str) -> bool:
    return any(holds(content, SECRET) for content in contents(url).values())


def test_what_is_forgotten_is_nowhere(url: str) -> None:
    one, other, late = join(url), join(url), join(url)
    for name, tokens in (("secret", SECRET), ("plain", [1] * 9)):
        say(one, name, tokens)
    one.refresh()
    published = only(url)
    published.join()
    say(one, "plain", [2] * 9)
    say(one, "secret", SECRET[::-1])
    one.refresh()
    assert len(read(other, "secret")) == 2
    say(other, "secret", SECRET[:50])
    say(late, "secret", SECRET)
    assert found_secret(url)  # the scan finds it
    mapped = other.find(["secret"])

    published.pin(map(published.id_of, ("secret", "plain")))
    assert published.forget([published.id_of("secret")]).pinned == {published.id_of("plain")}
    assert not found_secret(url)
    # A replica that does not know yet publishes again what it has, and that is of no use.
    late._guard("publish", late._publish)
    assert found_secret(url)
    assert read(join(url), "secret") == []
    published.join()
    assert not found_secret(url)
    for replica in (one, other, late):
        assert replica.refresh()
        assert replica.find(["secret"]) == []
        assert "secret" not in replica.memory.namespaces
    assert all(store.closed for store in mapped)
    published.join()
    assert not found_secret(url)
    assert read(join(url), "plain") == [[1] * 9, [2] * 9]
    # What is said later is remembered.
    say(one, "secret", [5] * 9)
    one.refresh()
    assert read(other, "secret") == [[5] * 9] == read(join(url), "secret")


def test_a_replica_that_does_not_know_what_was_forgotten_brings_nothing_back(
    tmp_path: Path,
) -> None:
    url = str(tmp_path)
    one, follower, late = join(url), join(url), join(url)
    assert read(follower, "secret") == []
    for replica in (one, late):
        say(replica, "secret", SECRET)
    one.refresh()
    assert read(follower, "secret") == [SECRET]
    only(url).forget([only(url).id_of("secret")])
    assert newest(url).number == 1  # that of the forgetting
    late._guard("publish", late._publish)
    assert read(follower, "secret") == [] == read(join(url), "secret")


def test_text_beside_what_was_forgotten_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the object that a replica published it in is gone at once."""
    url = str(tmp_path)
    one, follower = join(url), join(url)
    for replica in (one, follower):
        assert read(replica, "plain") == []
    say(one, "plain", [1] * 9)
    say(one, "secret", SECRET)
    one.refresh()
    only(url).forget([only(url).id_of("secret")])
    assert read(follower, "plain") == [[1] * 9]
    say(one, "plain", [2] * 9)
    one.refresh()
    assert read(follower, "plain") == [[1] * 9, [2] * 9]
    monkeypatch.setattr(Published, "chunk", lambda *_: pytest.fail("it is read again"))
    for _ in range(2):
        assert one.refresh() and follower.refresh()
    assert not one.faults and not follower.faults


def test_what_a_killed_join_left_is_forgotten_too(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url)
    say(one, "secret", SECRET)
    one.refresh()
    published = only(url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Published, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            published.join()
    assert sum("/packs/" in name for name in contents(url)) == 1
    published.forget([published.id_of("secret")])
    assert not found_secret(url)


def test_who_was_forgotten_is_not_known_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdraft.fleet.published._HORIZON", 4)
    url = str(tmp_path)
    one, late = join(url), join(url)
    say(one, "plain", [1] * 9)
    one.refresh()
    say(late, "secret", SECRET)
    published = only(url)
    published.forget([published.id_of("secret")])
    for number in range(6):
        say(one, "plain", [number] * 9)
        assert one.refresh()
        published.join()
    assert not newest(url).forgotten
    # What was published before that is of no use, since nobody knows any more.
    late._guard("publish", late._publish)
    published.join()
    assert not found_secret(url)
    # A replica that looks first knows.
    say(late, "other", [3] * 9)
    assert late.refresh()
    assert read(join(url), "other") == [[3] * 9]


# --- Isolation and secrecy ---


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 50), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
@settings(deadline=None, max_examples=30)
def test_no_token_of_one_namespace_is_drafted_in_another(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[int, int, int, bool]]
) -> None:
    url = str(tmp_path_factory.mktemp("fleet"))
    names = ["a", ("a",), ("a", None), None]
    replicas, engine = [join(url), join(url)], Engine()
    for place, owner, word, share in acts:
        replica, name = replicas[place], names[owner]
        first = 1000 * owner + word
        text = list(range(first, first + 20))
        stores, read = replica.memory.of(name), replica.find([name])
        # Begins as other namespaces' text does.
        request = engine.add_request(
            [1000 * other + word + 1 for other in range(4)] + text[:2],
            datastores=stores,
            read_only=read,
        )
        for tokens in (text[2:4], text[4:]):
            drafted = engine.propose(request, token_cost=0).tolist()
            assert {token // 1000 for token in drafted} <= {0, 1, 2, 3}
            prompt = {1000 * other + word + 1 for other in range(4)}
            assert all(token // 1000 == owner or token in prompt for token in drafted)
            engine.observe(request, tokens)
        engine.finish(request)
        for store in [*stores, *read]:
            for document in texts([store]):
                assert document[-1] // 1000 == owner
        if share:
            assert replica.refresh()
            if word % 3 == 0:
                only(url).join()
            for each in replicas:
                assert each.refresh()
    for replica in replicas:
        replica.close()


def test_names_are_in_no_file_and_modes_are_the_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one = join(str(tmp_path / "fleet"), model="secret-model")
        say(one, ("secret-adapter", "secret-salt"), [1, 2, 3])
        one.refresh()
        only(str(tmp_path / "fleet")).join()
    finally:
        os.umask(before)
    paths = list((tmp_path / "fleet").rglob("*"))
    assert len(paths) == 7
    for path in paths:
        assert "secret" not in str(path.relative_to(tmp_path))
        assert b"secret" not in (path.read_bytes() if path.is_file() else b"")
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_names_that_look_alike_are_kept_apart() -> None:
    published = Published(Objects("nowhere"), KEY, "0" * 64)
    names: list[Any] = [None, "None", "null", 1, "1", ("1",), (1,), ("a", "b"), ("a,b",), b"a", "a"]
    assert len({published.id_of(name) for name in [*names, ("a", None)]}) == len(names) + 1
    with pytest.raises(InvalidValueError, match="a namespace that is shared must be a text"):
        published.id_of(1.5)


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


# --- Hostile manifests and objects ---

PACK = f"packs/{1:020d}-{'0' * 64}"
names = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "..", "a/b", "x" * 64, "0" * 64, "é" * 64]),
    st.sampled_from([PACK, f"../{PACK}", f"{PACK}\n", f"text{PACK[5:]}", f"packs/../{PACK}"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=6,
)
packs = st.lists(st.one_of(values, st.tuples(names, st.integers())), max_size=3)
numbers = st.one_of(st.dictionaries(names, st.one_of(st.integers(), values), max_size=3), values)
manifests = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "format": st.sampled_from([4, 4, 4, 1, "4", None]),
            "number": st.sampled_from([1, 1, 1, 2, True]),
            "packs": st.one_of(packs, values),
            "gone": numbers,
            "forgotten": numbers,
            "pinned": st.one_of(st.lists(names, max_size=3), values),
        }
    ),
)


@given(manifests)
@settings(deadline=None, max_examples=200)
def test_a_hostile_manifest_is_refused_even_with_the_key(value: Any) -> None:
    """What is taken names files of its own folders alone."""
    published = Published(Objects("nothing"), KEY, "0" * 64)
    try:
        body = json.dumps(value, ensure_ascii=True)
    except ValueError:
        return
    content = f"{body}\n{published._manifest_mac(1, body)}\n".encode()
    try:
        manifest = published._parse(1, content)
    except DatastoreError:
        return
    for path in (*(pack.name for pack in manifest.packs), *manifest.gone):
        folder, _, name = path.partition("/")
        assert folder in ("packs", "text") and set(name) <= set("0123456789abcdef-")
    assert all(pack.size >= 0 for pack in manifest.packs)
    for name in (*manifest.forgotten, *manifest.pinned):
        assert len(name) == 64


@given(st.binary(max_size=300), st.integers(0, 400), st.sampled_from(["insert", "flip", "replace"]))
@example(b"behind its end", -1, "insert")
@settings(deadline=None, max_examples=200)
def test_a_manifest_that_was_changed_is_refused(noise: bytes, place: int, how: str) -> None:
    published = Published(Objects("memory://changed"), KEY, "0" * 64)
    manifest = Manifest(1, (Pack(PACK, 5),), {PACK: 1}, {"b" * 64: 1}, frozenset({"a" * 64}))
    name = f"{published.group}/manifests/{1:020d}"
    published._objects.remove(name)
    assert published._write(manifest)
    content = published._objects.read(name, 0, 1 << 20)
    assert published._parse(1, content) == manifest
    place %= len(content) + (how == "insert")
    if how == "insert":
        changed = content[:place] + noise + content[place:]
    elif how == "flip":
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    else:
        changed = noise
    if changed == content:
        return
    with pytest.raises(DatastoreError):
        published._parse(1, changed)
    with pytest.raises(DatastoreError):  # nor of another number
        published._parse(2, content)


def test_foreign_manifests_stop_nobody(url: str) -> None:
    one, other = join(url), join(url)
    say(one, "t", [1] * 9)
    one.refresh()
    for number, content in ((1, b"{}\nnothing\n"), (2, b""), (10**20 - 1, b"x" * 5000)):
        pipe(url, f"manifests/{number:020d}", content)
    assert only(url).join().number == 3
    other.find(["t"])
    for _ in range(3):
        assert other.refresh() and texts(other.find(["t"])) == [[1] * 9]
    # Each is counted once.
    assert other.faults["follow"] == 1
    assert len([name for name in contents(url) if "manifests" in name]) == 4


# --- Limits ---


def test_what_others_said_keeps_to_the_memory(tmp_path: Path) -> None:
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
            # The newest.
            assert [document[0] for document in found] == sorted(d[0] for d in found)
            assert not found or found[-1][-1] == 99_999
        assert other.memory.bytes <= other.memory.max_bytes
        assert other.bytes <= other.memory.bytes
    assert read(other, "c") and not other.faults
    # What it says has room too.
    say(other, "own", list(range(5000)))
    assert texts(other.memory.find(["own"])) == [list(range(5000))]


def test_what_a_fleet_refuses(tmp_path: Path) -> None:
    memory = Memory(1 << 20)
    with pytest.raises(InvalidValueError, match="key must have at least 16 bytes, got 5"):
        Replica(memory, str(tmp_path), key="short")
    with pytest.raises(InvalidValueError, match="interval must be greater than 0, got 0"):
        Replica(memory, str(tmp_path), key=KEY, interval=0)
    with pytest.raises(InvalidValueError, match="cannot use the URL 'nosuch://x'"):
        Replica(memory, "nosuch://x", key=KEY)


def test_objects_that_are_written_at_once_are_whole(tmp_path: Path) -> None:
    """Each process removes what killed ones have left, and no other's."""
    objects = Objects(tmp_path)

    def write(first: int) -> list[bool]:
        names = range(first, first + 100)
        return [objects.write(f"group/folder/{number}", b"content") for number in names]

    with ThreadPoolExecutor() as pool:
        written = [done for each in pool.map(write, (0, 50, 100)) for done in each]
    # Of two that write one name, one does.
    assert sum(written) == 200 and len(written) == 300
    assert objects.ls("group/folder") == {str(number): 7 for number in range(200)}
    assert objects.ls("group") == {"folder": None}
