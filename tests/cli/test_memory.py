"""`fastdraft memory`: what replicas publish, by a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastdraft.cli.app import app
from fastdraft.serving.host import Namespace
from fleets import KEY, contents, holds, join, only, say, texts


def fastdraft(*arguments: str, key: str = KEY.decode()) -> Result:
    environment = {"FASTDRAFT_MEMORY_KEY": key}
    return CliRunner().invoke(app, ["memory", *arguments], env=environment)


def test_a_fleet_by_the_command_line(tmp_path: Path) -> None:
    url = str(tmp_path)
    replica, reader = join(url), join(url)
    acme, salted = Namespace(name="acme"), Namespace(salt=("salt", None))
    for name, token in ((acme, 60_001), (salted, 60_002)):
        say(replica, name, [token] * 50)
    replica.refresh()
    listed = fastdraft("ls", url).output
    assert listed.count(" 50 tokens ") == 2 and "acme" not in listed
    assert "manifest 0, 0 bytes in 0 packs" in listed
    assert fastdraft("pin", url, "acme").exit_code == 0
    assert fastdraft("ls", url).output.count("pinned") == 1
    assert "no longer pinned" in fastdraft("pin", "--off", url, "acme").output
    assert "pinned" not in fastdraft("ls", url).output
    assert fastdraft("pin", url, "acme").exit_code == 0
    reader.find([acme, salted])
    reader.refresh()
    assert len(texts(reader.find([acme, salted]))) == 2
    for token, arguments in ((60_001, ("acme",)), (60_002, ("--salt", "salt"))):
        assert any(holds(content, [token] * 2) for content in contents(url).values())
        assert "forgotten, manifest" in fastdraft("forget", url, *arguments).output
        assert not any(holds(content, [token] * 2) for content in contents(url).values())
    reader.refresh()
    assert reader.find([acme, salted]) == []
    assert not fastdraft("ls", url).output.count(" tokens ")
    replica.close()


def test_namespaces_are_shown_by_their_bytes(tmp_path: Path) -> None:
    replica = join(str(tmp_path))
    for name, size in (("small", 9), ("large", 5000), ("other", 500)):
        say(replica, name, list(range(size)))
    replica.refresh()
    only(str(tmp_path)).join()
    say(replica, "small", list(range(900)))  # what waits counts too
    replica.refresh()
    *lines, total = fastdraft("du", str(tmp_path)).output.splitlines()
    sizes = [int(line.split()[0].replace(",", "")) for line in lines]
    id_of = only(str(tmp_path)).id_of
    assert [line.split()[1] for line in lines] == [id_of(n) for n in ("large", "small", "other")]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    assert total.split()[:2] == [f"{sum(sizes):,}", "model"]


@pytest.mark.parametrize("command", ["ls", "du", "pin", "forget"])
@pytest.mark.parametrize("wrong", ["key", "url"])
def test_another_key_or_url_is_refused(tmp_path: Path, command: str, wrong: str) -> None:
    url = str(tmp_path / "fleet")
    replica = join(url)
    say(replica, None, [1] * 9)
    replica.refresh()
    before = contents(url)
    arguments = [command, url if wrong == "key" else str(tmp_path / "flet")]
    arguments += ["--unnamed"] if command in ("pin", "forget") else []
    key = "another operator's" if wrong == "key" else KEY.decode()
    result = fastdraft(*arguments, key=key)
    assert result.exit_code == 1
    assert "nothing is published there with this key" in result.output
    assert ("have text of another key" in result.output) == (wrong == "key")
    assert contents(url) == before and not (tmp_path / "flet").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    replica = join(str(tmp_path))
    say(replica, None, [1] * 9)
    replica.refresh()
    for arguments, message in (
        (("ls", "nosuch://x"), "cannot use the URL 'nosuch://x'"),
        (("pin", str(tmp_path), "acme"), "no model has text of this namespace"),
    ):
        result = fastdraft(*arguments)
        assert result.exit_code == 1 and message in result.output


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    replica = join(str(tmp_path))
    for name in ("a", "b"):
        say(replica, name, [1] * 9)
        replica.refresh()
    path = min(tmp_path.glob("*/text/*"))
    path.write_bytes(path.read_bytes()[:-1])
    result = fastdraft("ls", str(tmp_path))
    assert result.exit_code == 0 and f"left out: text/{path.name}" in result.output


class LibraryError(Exception):
    """As botocore has them, which are no OSErrors."""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store that cannot be reached."""

    def ls(*_: object, **__: object) -> None:
        raise LibraryError("no connection")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", ls)
    return "memory://gone"


def test_a_store_that_is_gone_is_named_in_one_line(gone: str) -> None:
    result = fastdraft("ls", gone)
    assert result.exit_code == 1
    assert result.output == "Error: the store cannot be used: LibraryError: no connection\n"


def test_a_namespace_is_named_in_one_way(tmp_path: Path) -> None:
    replica = join(str(tmp_path))
    replica.memory.of(None)[0].add([1, 2, 3])
    replica.refresh()
    for arguments in ((), ("acme", "--unnamed"), ("--id", "x", "--unnamed")):
        result = fastdraft("forget", str(tmp_path), *arguments)
        assert result.exit_code == 1 and "give a namespace" in result.output
    assert (
        "64 hexadecimal digits, got 'x'" in fastdraft("forget", str(tmp_path), "--id", "x").output
    )
    assert fastdraft("forget", str(tmp_path), "--unnamed").exit_code == 0
    replica.close()
    result = CliRunner().invoke(
        app, ["memory", "ls", str(tmp_path)], env={"FASTDRAFT_MEMORY_KEY": ""}
    )
    assert result.exit_code == 1 and "FASTDRAFT_MEMORY_KEY, got none" in result.output
