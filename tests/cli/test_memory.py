"""`fastdraft memory`: what replicas publish, by a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastdraft.cli.app import app
from fastdraft.integrations.host import Namespace
from fleets import KEY, contents, join, texts


def fastdraft(*arguments: str) -> Result:
    environment = {"FASTDRAFT_MEMORY_KEY": KEY.decode()}
    return CliRunner().invoke(app, ["memory", *arguments], env=environment)


def test_a_fleet_by_the_command_line(tmp_path: Path) -> None:
    url = str(tmp_path)
    replica = join(url)
    acme, salted = Namespace(name="acme"), Namespace(salt=("salt", None))
    for name, token in ((acme, 60_001), (salted, 60_002)):
        replica.memory.of(name)[0].add([token] * 50)
    replica.refresh()
    assert "in 2 segments" in fastdraft("du", url).output
    assert "manifest 1, 2 namespaces" in fastdraft("build", url).output
    listed = fastdraft("ls", url).output
    assert listed.count(" tokens ") == 2 and "acme" not in listed
    assert fastdraft("pin", url, "acme").exit_code == 0
    assert fastdraft("ls", url).output.count("pinned") == 1
    assert fastdraft("pin", "--off", url, "acme").exit_code == 0
    assert "pinned" not in fastdraft("ls", url).output
    replica.find([acme, salted])
    replica.refresh()
    assert len(texts(replica.find([acme, salted]))) == 2
    for token, arguments in ((60_001, ("acme",)), (60_002, ("--salt", "salt"))):
        text = token.to_bytes(4, "little") * 2, token.to_bytes(2, "little") * 2
        assert any(part in content for part in text for content in contents(url).values())
        assert "forgotten by manifest" in fastdraft("forget", url, *arguments).output
        assert not any(part in content for part in text for content in contents(url).values())
    replica.refresh()
    assert replica.find([acme, salted]) == []
    assert not fastdraft("ls", url).output.count(" tokens ")
    replica.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "{url}"), "nothing is published under"),
        (("ls", "nosuch://x"), "cannot use the URL 'nosuch://x'"),
        (("pin", "{url}", "acme"), "no model has text of this namespace"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = fastdraft(*(each.format(url=tmp_path) for each in arguments))
    assert result.exit_code == 1 and message in result.output


class LibraryError(Exception):
    """As botocore has them, which are no OSErrors."""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store that cannot be reached."""

    def ls(*_: object, **__: object) -> None:
        raise LibraryError("no connection")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", ls)
    return "memory://gone"


@pytest.mark.parametrize("command", ["build", "ls", "du"])
def test_a_store_that_is_gone_is_named_in_one_line(command: str, gone: str) -> None:
    result = fastdraft(command, gone)
    assert result.exit_code == 1
    assert result.output == "Error: the store cannot be used: LibraryError: no connection\n"


def test_a_builder_outlasts_a_store_that_is_gone(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    result = fastdraft("build", gone, "--every", "5")
    assert pauses == [5, 5, 5]
    assert result.output.count("not built, and tried again: LibraryError: no connection\n") == 3


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
