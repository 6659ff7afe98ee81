"""A fleet: what one replica says the others draft, whoever fails, and nobody else reads it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdraft import Datastore, Engine, Memory
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.files import TemporaryFolder
from fastdraft.fleet import Builder, Manifest, Published, Replica
from fastdraft.fleet.objects import Objects
from fastdraft.fleet.published import Entry, StoreFile
from fastdraft.memory_folder import MemoryFolder
from fleets import KEY, builder, contents, join, only, texts


def say(replica: Replica, namespace: Any, tokens: list[int]) -> None:
    replica.memory.of(namespace)[0].add(tokens)


def read(replica: Replica, namespace: Any) -> list[list[int]]:
    """What the replica reads of a namespace after a refresh."""
    replica.find([namespace])
    assert replica.refresh(), replica.faults
    return texts(replica.find([namespace]))


# --- Sharing ---


def test_what_one_replica_said_another_drafts(url: str) -> None:
    one, other = join(url), join(url)
    engine = Engine()
    request = engine.add_request([1, 2, 3], datastores=one.memory.of("tenant"))
    engine.observe(request, [4, 5, 6])
    engine.finish(request)
    assert one.refresh()
    manifest = builder(url).build()
    assert manifest.number == 1
    assert other.find(["tenant"]) == []  # it is fetched now
    assert other.refresh()
    [store] = other.find(["tenant"])
    assert store.frozen and one.published_tokens == 6
    request = engine.add_request([9, 3, 4], read_only=other.find(["tenant"]))
    assert engine.propose(request, token_cost=0).tolist() == [5, 6]
    assert other.find(["another"]) == []
    for replica in (one, other):
        replica.close()
        assert not replica.faults


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["say", "publish", "build", "follow", "restart"]),
            st.integers(0, 2),
            st.sampled_from("ab"),
            st.integers(1, 60),
        ),
        max_size=40,
    )
)
@settings(deadline=None, max_examples=40)
def test_what_was_published_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, str, int]]
) -> None:
    url = str(tmp_path_factory.mktemp("fleet"))
    replicas = [join(url) for _ in range(3)]
    said: dict[str, list[list[int]]] = {"a": [], "b": []}
    number = 0
    for act, place, name, size in acts:
        replica = replicas[place]
        if act == "say":
            number += 1
            document = [number] * size
            said[name].append(document)
            say(replica, name, document)
        elif act == "publish" or act == "follow":
            assert replica.refresh()
        elif act == "restart":
            replica.close()
            replicas[place] = join(url)
        elif Objects(url).folders():
            builder(url).build()
    for replica in replicas:
        assert replica.refresh()
    if not number:
        return
    builder(url).build()
    for name, documents in said.items():
        found = read(replicas[0], name)
        assert sorted(found) == sorted(documents)
    for replica in replicas:
        replica.close()


def test_running_requests_keep_the_stores_that_they_began_with(tmp_path: Path) -> None:
    one, other, engine = join(str(tmp_path)), join(str(tmp_path)), Engine()
    say(one, "t", [1, 2, 3, 4, 5])
    one.refresh()
    builder(str(tmp_path)).build()
    assert read(other, "t") == [[1, 2, 3, 4, 5]]
    request = engine.add_request([9, 2, 3], read_only=other.find(["t"]))
    for number in range(3):
        say(one, "t", [7 + number] * 9)
        one.refresh()
        builder(str(tmp_path)).build()
        other.refresh()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]
    other.close()
    assert engine.propose(request, token_cost=0).tolist() == [4, 5]


def test_the_background_publishes_and_follows_by_itself(tmp_path: Path) -> None:
    url = str(tmp_path)
    one, other = join(url, interval=0.01), join(url, interval=0.01)
    say(one, "t", [1, 2, 3])
    while not Objects(url).folders() or not only(url).segments():
        pass
    while not texts(other.find(["t"])):
        builder(url).build()
    one.close()
    other.close()


# --- Stores ---


def test_a_namespace_has_few_stores_and_files_that_nothing_names_go(url: str) -> None:
    one, other = join(url), join(url)
    documents = [[number] * 700 for number in range(30)]
    for document in documents:
        say(one, "t", document)
        one.refresh()
        manifest = builder(url).build()
        [entry] = manifest.namespaces.values()
        assert len(entry.stores) <= 4
    assert read(other, "t") == documents
    # The last two manifests' files, and no others.
    builder(url).build()
    assert sum(map(len, only(url).stores().values())) <= 9
    assert sum(map(len, only(url).segments().values())) <= 1
    assert len(only(url).numbers()) <= 8


def test_the_oldest_text_leaves_when_there_is_too_much(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url, memory_bytes=64 << 20)
    built = builder(url, max_bytes=2 << 20) if Objects(url).folders() else None
    for number in range(40):
        say(one, "t", list(range(number * 10_000, (number + 1) * 10_000)))
        one.refresh()
        built = built or builder(url, max_bytes=2 << 20)
        assert built.build().bytes <= 2 << 20
    assert built is not None
    found = read(join(url), "t")
    assert found[-1] == list(range(390_000, 400_000))
    assert sum(map(len, found)) > 30_000
    # Namespaces whose text changed longest ago leave first, but for pinned ones.
    say(one, "pinned", list(range(20_000)))
    one.refresh()
    built.build()
    built.pin([only(url).id_of("pinned")])
    for name in "abcd":
        say(one, name, list(range(20_000)))
        one.refresh()
        manifest = built.build()
        assert manifest.bytes <= 2 << 20
    held = {name for name in ("pinned", *"tabcd") if texts_of(manifest, url, name)}
    assert {"pinned", "d"} <= held and not {"t", "a"} & held


def texts_of(manifest: Manifest, url: str, name: str) -> tuple[StoreFile, ...]:
    return manifest.namespaces.get(only(url).id_of(name), Entry()).stores


@pytest.mark.parametrize("alphabet", [2, 100_000])
@pytest.mark.parametrize("shift", [0, 70_000])
def test_much_text_is_joined_whole(tmp_path: Path, alphabet: int, shift: int) -> None:
    """However many bytes a token takes in a file, and whatever live stores take."""
    published = Published.of(Objects(tmp_path / "fleet"), KEY, "model", None)
    name, chance = published.id_of("t"), np.random.default_rng(0)
    for sequence in range(2):
        with Datastore() as live:
            live.add(chance.integers(0, alphabet, 150_000) + shift * sequence)
            live.save(tmp_path / "segment.fds")
        published.put_segment(name, "0" * 16, sequence, 0, tmp_path / "segment.fds")
    [entry] = Builder(published).build().namespaces.values()
    assert entry.tokens == 300_000 and len(entry.stores) == 1


# --- Several builders, and killed ones ---


def test_builders_at_once_lose_nothing(url: str) -> None:
    one = join(url)
    say(one, "t", [0])
    one.refresh()
    failed: list[BaseException] = []

    def build() -> None:
        built = builder(url)
        while not done.is_set():
            try:
                built.build()
            except DatastoreError:
                continue  # the others were first
            except BaseException as error:
                failed.append(error)
                return

    done = threading.Event()
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    documents = [[number] * 50 for number in range(12)]
    for number, document in enumerate(documents):
        say(one, "ab"[number % 2], document)
        assert one.refresh()
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    builder(url).build()
    other = join(url)
    for name in "ab":
        assert sorted(read(other, name)) == [
            d for i, d in enumerate(documents) if "ab"[i % 2] == name
        ]


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_a_builder_killed_at_any_step_loses_nothing(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = join(url)
    documents = [[number] * 50 for number in range(6)]
    for document in documents[:3]:
        say(one, "t", document)
        one.refresh()
        builder(url).build()
    for document in documents[3:]:
        say(one, "t", document)
        one.refresh()
    left = step
    whole = {name: getattr(Objects, name) for name in ("put", "create", "remove")}
    with monkeypatch.context() as patch:
        for name in whole:

            def act(self: Objects, *args: Any, name: str = name) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Stopped
                return whole[name](self, *args)

            patch.setattr(Objects, name, act)
        with contextlib.suppress(Stopped):
            builder(url).build()
    assert read(join(url), "t") in (documents[:3], documents)
    builder(url).build()
    assert read(join(url), "t") == documents


def test_where_no_write_is_exclusive_the_last_manifest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow builder writes over another's manifest, and nothing is lost."""
    url = f"memory://{tmp_path}"
    one = join(url)
    say(one, "t", [1] * 9)
    one.refresh()

    def overwrite(self: Objects, name: str, content: bytes) -> bool:
        self._files.pipe_file(self._path(name), content)
        return True

    monkeypatch.setattr(Objects, "create", overwrite)
    slow = builder(url)
    write = Published.write

    def late(self: Published, manifest: Manifest) -> bool:
        monkeypatch.setattr(Published, "write", write)
        say(one, "t", [2] * 9)
        one.refresh()
        builder(url).build()
        return write(self, manifest)

    monkeypatch.setattr(Published, "write", late)
    slow.build()
    assert read(join(url), "t") == [[1] * 9]
    builder(url).build()
    assert read(join(url), "t") == [[1] * 9, [2] * 9]


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
    put, full = Objects.put, True

    def maybe(self: Objects, name: str, path: Path) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, name, path)

    monkeypatch.setattr(Objects, "put", maybe)
    for number in range(40):
        say(replica, "t", list(range(number * 1000, (number + 1) * 1000)))
        assert not replica.refresh()
    full = False
    assert replica.refresh()
    assert replica.dropped_tokens > 20_000
    # Separators count as tokens.
    assert abs(replica.published_tokens + replica.dropped_tokens - 40_000) <= 80
    builder(url).build()
    assert read(join(url), "t")[-1] == list(range(39_000, 40_000))
    replica.close()


def test_a_full_disk_costs_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    one, other = join(url), join(url)
    say(one, "t", [1, 2, 3])
    one.refresh()
    builder(url).build()

    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "fetch", full)
        other.find(["t"])
        assert not other.refresh()
        say(one, "t", [4, 5])
        one.refresh()
        built = builder(url)
        with pytest.raises(OSError, match="No space"):
            built.build()
    assert other.faults["follow"] >= 1
    assert read(other, "t") == [[1, 2, 3]]
    builder(url).build()
    assert read(other, "t") == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("damage", ["flipped", "short", "foreign", "moved"])
def test_damaged_and_foreign_segments_are_left_out(url: str, damage: str) -> None:
    one = join(url)
    for name, tokens in (("a", [1] * 9), ("b", [2] * 9), ("a", [3] * 9)):
        say(one, name, tokens)
        one.refresh()
    objects, group = Objects(url), only(url).group
    found = only(url).segments()
    a, b = (only(url).id_of(name) for name in "ab")
    path = f"{group}/segments/{a}/{found[a][0].file}"
    content = bytearray(objects.read(path, 1 << 20))
    if damage == "flipped":
        content[4500] ^= 1
    elif damage == "short":
        content = content[:-100]
    elif damage == "foreign":
        content = bytearray(b"x" * 9000)
    elif damage == "moved":  # to another tenant
        source = f"{group}/segments/{b}/{found[b][0].file}"
        content = bytearray(objects.read(source, 1 << 20))
        path = f"{group}/segments/{a}/{found[b][0].file}"
    objects._files.pipe_file(objects._path(path), bytes(content))
    built = builder(url)
    built.build()
    assert built.refused == 1
    expected = [[1] * 9, [3] * 9] if damage == "moved" else [[3] * 9]
    assert read(join(url), "a") == expected
    assert read(join(url), "b") == [[2] * 9]


def test_a_damaged_store_keeps_what_was_mapped(url: str) -> None:
    one, other = join(url), join(url)
    say(one, "t", [1] * 9)
    one.refresh()
    manifest = builder(url).build()
    assert read(other, "t") == [[1] * 9]
    say(one, "t", [2] * 9)
    one.refresh()
    manifest = builder(url).build()
    [(name, entry)] = manifest.namespaces.items()
    objects = Objects(url)
    path = f"{only(url).group}/stores/{name}/{entry.stores[-1].file}"
    content = bytearray(objects.read(path, 1 << 20))
    content[4500] ^= 1
    objects._files.pipe_file(objects._path(path), bytes(content))
    assert not other.refresh() and other.faults["follow"] == 1
    assert texts(other.find(["t"])) == [[1] * 9]


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


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
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
    builder(url).build()
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
    builder(url).build()
    numbers = [document[0] for document in read(join(url), "tenant")]
    assert set(said) <= set(numbers)
    assert len(numbers) == len(set(numbers))
    # Of each replica in the order in which it was said.
    for first in (0, 1000, 2000):
        own = [number for number in numbers if first <= number < first + 1000]
        assert own == sorted(own)


KILLED = f"""
import os, shutil, sys
from fastdraft import Memory
from fastdraft.fleet import Replica

memory = Memory(8 << 20)
memory.of("tenant")[0].add([1, 2, 3])
shutil.copyfileobj = lambda *_: os.kill(os.getpid(), 9)
Replica(memory, sys.argv[1], key={KEY!r}, model="model", folder=sys.argv[2]).refresh()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_what_a_killed_replica_leaves_on_disks_is_removed(tmp_path: Path) -> None:
    url, folder = tmp_path / "fleet", tmp_path / "temporary"
    folder.mkdir()
    with TemporaryFolder("fastdraft-fleet-", folder) as living:
        subprocess.run([sys.executable, "-c", KILLED, str(url), str(folder)])
        assert len(list(folder.glob("*/segment.fds"))) == len(list(url.rglob("*.tmp"))) == 1
        replica = join(str(url), folder=folder)
        assert list(folder.iterdir()) == [living.path]
        say(replica, "tenant", [4, 5, 6])
        assert replica.refresh()
        builder(str(url), folder=folder).build()
        assert not list(url.rglob("*.tmp"))
        assert read(replica, "tenant") == [[4, 5, 6]]
        # It was not closed, and leaves nothing.
        assert list(folder.iterdir()) == [living.path]


# --- Forgetting ---

SECRET = list(range(60_000, 60_100))


def holds(content: bytes) -> bool:
    """Whether bytes hold two tokens of the secret text in a row, in any width."""
    wide = b"".join(token.to_bytes(4, "little") for token in SECRET)
    narrow = b"".join(token.to_bytes(2, "little") for token in SECRET)
    return any(
        text[i : i + 2 * width] in content
        for text, width in ((wide, 4), (narrow, 2))
        for i in range(0, len(text) - width, width)
    )


def test_what_is_forgotten_is_nowhere(url: str) -> None:
    one, other, late = join(url), join(url), join(url)
    say(one, "secret", SECRET)
    say(one, "plain", [1] * 9)
    one.refresh()
    built = builder(url)
    built.build()
    say(other, "secret", SECRET[:50])
    assert read(other, "secret") == [SECRET]
    say(late, "secret", SECRET)
    assert any(holds(content) for content in contents(url).values())  # the scan finds it
    mapped = other.find(["secret"])

    built.forget([only(url).id_of("secret")])
    assert not any(holds(content) for content in contents(url).values())
    # A replica that does not know yet publishes again what it has, and that is of no use.
    late._guard("publish", late._publish)
    assert any(holds(content) for content in contents(url).values())
    built.build()
    assert not any(holds(content) for content in contents(url).values())
    for replica in (one, other, late):
        assert replica.refresh()
        assert replica.find(["secret"]) == []
        assert "secret" not in replica.memory.namespaces
    assert all(store.closed for store in mapped)
    built.build()
    assert not any(holds(content) for content in contents(url).values())
    assert read(other, "plain") == [[1] * 9]
    # What is said later is remembered.
    say(one, "secret", [5] * 9)
    one.refresh()
    built.build()
    assert read(other, "secret") == [[5] * 9]


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
            builder(url).build()
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
        builder(str(tmp_path / "fleet")).build()
    finally:
        os.umask(before)
    paths = list((tmp_path / "fleet").rglob("*"))
    assert len(paths) == 9
    for path in paths:
        assert "secret" not in str(path.relative_to(tmp_path))
        assert b"secret" not in (path.read_bytes() if path.is_file() else b"")
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


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
    builder(url).build()
    assert read(other, "t") == []


# --- Hostile manifests and segments ---

names = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "..", "a/b", "x" * 64, "0" * 64, "é" * 64]),
    st.just(f"{1:020d}-{'0' * 16}-{'0' * 64}.fds"),
    st.just(f"../{1:020d}-{'0' * 16}-{'0' * 64}.fds"),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), names),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "stores": st.lists(st.one_of(values, st.tuples(names, st.integers(), st.integers()))),
        "segments": st.lists(names, max_size=3),
        "written": st.one_of(st.integers(), values),
        "pinned": st.one_of(st.booleans(), values),
    }
)
manifests = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "format": st.sampled_from([1, 1, 1, 2, "1", None]),
            "number": st.sampled_from([1, 1, 1, 2, True]),
            "namespaces": st.one_of(
                st.dictionaries(names, st.one_of(entries, values), max_size=3), values
            ),
            "forgotten": st.one_of(
                st.dictionaries(names, st.one_of(st.integers(), values), max_size=3), values
            ),
        }
    ),
)


@given(manifests)
@settings(deadline=None, max_examples=100)
def test_a_hostile_manifest_is_refused_even_with_the_key(value: Any) -> None:
    """What is taken names files of its own folder alone."""
    published = Published(Objects("memory://nothing"), KEY, "0" * 64)
    try:
        body = json.dumps(value, ensure_ascii=True)
    except ValueError:
        return
    content = f"{body}\n{published._manifest_mac(1, body)}\n".encode()
    try:
        manifest = published._parse(1, content)
    except DatastoreError:
        return
    for name, entry in manifest.namespaces.items():
        assert len(name) == 64 and "/" not in name and "." not in name
        for file in (*(store.file for store in entry.stores), *entry.segments):
            assert "/" not in file and ".." not in file and file.endswith(".fds")
        assert all(store.bytes >= 0 for store in entry.stores)


@given(st.binary(max_size=300), st.integers(0, 400), st.sampled_from(["insert", "flip", "replace"]))
@settings(deadline=None, max_examples=200)
def test_a_manifest_that_was_changed_is_refused(noise: bytes, place: int, how: str) -> None:
    published = Published(Objects("memory://changed"), KEY, "0" * 64)
    entry = Entry((StoreFile(f"{1:020d}-{'0' * 16}-{'0' * 64}.fds", 5, 1),))
    manifest = Manifest(1, {"a" * 64: entry}, {"b" * 64: 1})
    published._objects.remove(published._manifest_name(1))
    assert published.write(manifest)
    content = published._objects.read(published._manifest_name(1), 1 << 20)
    assert published._parse(1, content) == manifest
    place %= len(content)
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
    objects, group = Objects(url), only(url).group
    for number in (1, 2, 10**20 - 1):
        assert objects.create(f"{group}/manifests/{number:020d}.json", b"{}\nnothing\n")
    assert objects.create(f"{group}/manifests/../{5:020d}.json", b"") or True
    built = builder(url)
    assert built.build().number == 3
    assert built.refused >= 2
    other.find(["t"])
    assert other.refresh() and texts(other.find(["t"])) == [[1] * 9]
    assert other.faults["follow"] >= 1


# --- Limits ---


def test_mapped_stores_keep_to_their_bytes(tmp_path: Path) -> None:
    url = str(tmp_path)
    one = join(url)
    for name in "abc":
        say(one, name, list(range(5000)))
    one.refresh()
    size = builder(url).build().bytes // 3
    other = join(url, max_bytes=2 * size + 10)
    for name in "abc":
        other.find([name])
    other.refresh()
    assert other.bytes == 2 * size
    # Those that were used last.
    assert [bool(other.find([name])) for name in "abc"] == [False, True, True]
    other.refresh()
    other.find(["a"])
    other.refresh()
    assert other.find(["a"]) and other.bytes == 2 * size


def test_what_a_fleet_refuses(tmp_path: Path) -> None:
    memory = Memory(1 << 20)
    with pytest.raises(InvalidValueError, match="key must have at least 16 bytes, got 5"):
        Replica(memory, str(tmp_path), key="short")
    with pytest.raises(InvalidValueError, match="interval must be greater than 0, got 0"):
        Replica(memory, str(tmp_path), key=KEY, interval=0)
    with pytest.raises(InvalidValueError, match="max_bytes must be at least 0, got -1"):
        Replica(memory, str(tmp_path), key=KEY, max_bytes=-1)
    with pytest.raises(InvalidValueError, match="cannot use the URL 'nosuch://x'"):
        Replica(memory, "nosuch://x", key=KEY)
    with pytest.raises(DatastoreError, match="cannot use the folder"):
        Replica(memory, str(tmp_path), key=KEY, folder=tmp_path / "none")
    saved = Memory(1 << 20, folder=MemoryFolder(tmp_path / "saved", key=KEY))
    with pytest.raises(InvalidValueError, match="memory must have no folder in a fleet"):
        Replica(saved, str(tmp_path), key=KEY)
    saved.close()
    published = Published(Objects(str(tmp_path)), KEY, "0" * 64)
    with pytest.raises(InvalidValueError, match="max_bytes must be at least 2097152, got 1"):
        Builder(published, max_bytes=1)


def test_what_is_being_written_is_not_removed(tmp_path: Path) -> None:
    """While another process removes what killed ones have left."""
    objects, others = Objects(tmp_path), Objects(tmp_path)
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            others.remove_begun()

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        for number in range(300):
            assert objects.create(f"folder/{number}", b"content")
    finally:
        done.set()
        removing.join()
    assert set(objects.find("folder")) == {f"folder/{number}" for number in range(300)}
