"""`fastdraft memory`: the published text of replicas, by a command line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import Result

import command_line
from fastdraft.memory.sharing import objects as objects_module
from fastdraft.serving.host import Namespace
from fleets import KEY, contents, folder_of, holds, join, publish, read, say, texts


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "_PAUSE", 0)


def fastdraft(*arguments: str, key: str = KEY.decode()) -> Result:
    return command_line.fastdraft("memory", *arguments, env={"FASTDRAFT_MEMORY_KEY": key})


def test_a_fleet_by_the_command_line(tmp_path: Path) -> None:
    url = str(tmp_path)
    replica, reader = join(url), join(url)
    acme, salted = Namespace(name="acme"), Namespace(salt=("salt", None))
    for name, token, size in ((acme, 60_001, 50), (salted, 60_002, 5000), (None, 60_003, 9)):
        say(replica, name, [token] * size)
    replica.refresh()
    listed = fastdraft("ls", url).output
    assert "acme" not in listed
    # The largest first.
    assert [line.split()[1] for line in listed.splitlines()[1:]] == ["5,000", "50", "9"]
    reader.find([acme, salted])
    reader.refresh()
    assert len(texts(reader.find([acme, salted]))) == 2
    for token, arguments in (
        (60_001, ("acme",)),
        (60_002, ("--salt", "salt")),
        (60_003, ("--unnamed",)),
    ):
        assert any(holds(content, [token] * 2) for content in contents(url).values())
        assert "forgotten" in fastdraft("forget", url, *arguments).output
        assert not any(holds(content, [token] * 2) for content in contents(url).values())
    reader.refresh()
    assert reader.find([acme, salted]) == []
    replica.close()


def test_old_objects_are_pruned_and_what_cannot_be_verified_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    one = join(url)
    with monkeypatch.context() as patch:
        now = time.time()
        patch.setattr(objects_module.time, "time", lambda: now - 9 * 86400)
        say(one, "t", [1] * 9)
        one.refresh()
        say(one, "gone", [1] * 9)
        one.refresh()
        assert fastdraft("forget", url, "--id", folder_of(url, "gone")[65:]).exit_code == 0
    say(one, "t", [2] * 9)
    one.refresh()
    (tmp_path / folder_of(url, "t") / "junk").write_bytes(b"x" * 999)
    assert fastdraft("prune", url, "--older-than", "10").output.endswith("0 objects removed\n")
    result = fastdraft("prune", url, "--older-than", "8")
    # With a tombstone.
    assert result.output.endswith("2 objects removed\n") and "left out: " in result.output
    assert (tmp_path / folder_of(url, "t") / "junk").exists()
    assert read(join(url), "t") == [[2] * 9]


def test_objects_that_are_left_out_are_named(tmp_path: Path) -> None:
    replica = join(str(tmp_path))
    for name in ("a", "b"):
        say(replica, name, [1] * 9)
        replica.refresh()
    [path] = (tmp_path / folder_of(str(tmp_path), "a")).iterdir()
    path.write_bytes(path.read_bytes()[:50])
    result = fastdraft("ls", str(tmp_path))
    assert result.exit_code == 0
    assert f"{path.name} ends within its head" in result.output and " 9 tokens" in result.output


@pytest.fixture
def published(tmp_path: Path) -> str:
    """The URL of a fleet with a text of no name."""
    url = str(tmp_path / "fleet")
    replica = publish(url, None, [1] * 9)
    replica.close()
    return url


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["ls", "nosuch://x"], KEY, "cannot use the URL 'nosuch://x'"),
        (["ls", "{}"], b"", "FASTDRAFT_MEMORY_KEY, got none"),
        *(
            (command, key, "with this key")
            for key, url in ((b"another operator's", "{}"), (KEY, "{}-mistyped"))
            for command in (["ls", url], ["forget", url, "--unnamed"])
        ),
        # A mistyped name is no success.
        (["forget", "{}", "acme"], KEY, "nothing is published of this namespace"),
        (["forget", "{}"], KEY, "give a namespace"),
        (["forget", "{}", "acme", "--unnamed"], KEY, "give a namespace"),
        (["forget", "{}", "--id", "x", "--unnamed"], KEY, "give a namespace"),
        (["forget", "{}", "--id", "x"], KEY, "64 hexadecimal digits, got 'x'"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(
    published: str, arguments: list[str], key: bytes, message: str
) -> None:
    before = contents(published)
    result = fastdraft(*(each.format(published) for each in arguments), key=key.decode())
    assert result.exit_code == 1 and message in result.output
    assert contents(published) == before and not Path(f"{published}-mistyped").exists()


class LibraryError(Exception):
    """As botocore has them, which are no OSErrors."""


def test_a_store_that_cannot_be_reached_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ls(*_: object, **__: object) -> None:
        raise LibraryError("no connection")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", ls)
    result = fastdraft("ls", "memory://gone")
    assert result.exit_code == 1
    assert result.output == "Error: the store cannot be used: LibraryError: no connection\n"
