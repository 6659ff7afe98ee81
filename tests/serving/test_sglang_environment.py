"""The settings of a memory in SGLang's environment, named as an operator sets them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastdraft.errors import InvalidValueError
from fastdraft.serving.settings import COMMON_NGRAMS, MemorySettings
from fastdraft.serving.sglang.environment import memory_settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("MEMORY_BYTES", "2000000"),
        ("MEMORY_URL", "s3://bucket"),
        ("MAX_BYTES", "5"),
        ("DATASTORES", "a.fds:b.fds"),
        ("NGRAMS", "words.fdn"),
        ("SHARED_NAMESPACES", "all,some"),
    ):
        monkeypatch.setenv(f"FASTDRAFT_{name}", value)
    assert memory_settings(SimpleNamespace()) == MemorySettings(
        memory_bytes=2_000_000,
        memory_url="s3://bucket",
        max_bytes=5,
        datastores=["a.fds", "b.fds"],
        ngrams="words.fdn",
        shared_namespaces=["all", "some"],
    )


def test_ranks_draft_from_a_table_that_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = SimpleNamespace(), SimpleNamespace(tp_size=2)
    assert [memory_settings(each).ngrams for each in (one, two)] == [COMMON_NGRAMS, None]
    monkeypatch.setenv("FASTDRAFT_NGRAMS", "none")
    assert memory_settings(one).ngrams is None
    monkeypatch.setenv("FASTDRAFT_NGRAMS", "words.fdn")
    assert memory_settings(two).ngrams == "words.fdn"


@pytest.mark.parametrize(
    ("environment", "ranks", "message"),
    [
        (
            {"MEMORY_BYTES": "1 GB"},
            1,
            "FASTDRAFT_MEMORY_BYTES must be a number of bytes, got '1 GB'",
        ),
        ({"MEMORY_BYTES": "5"}, 1, "^FASTDRAFT_MEMORY_BYTES must be 0, or enough .* got 5"),
        (
            {"MEMORY_BYTES": "0", "MEMORY_URL": "s3://x"},
            1,
            "^FASTDRAFT_MEMORY_URL must be left out where FASTDRAFT_MEMORY_BYTES is 0",
        ),
        ({"MEMORY_URL": "s3://x"}, 2, "FASTDRAFT_MEMORY_URL must not be set with tp_size 2"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_set(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: int, message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"FASTDRAFT_{name}", value)
    with pytest.raises(InvalidValueError, match=message):
        memory_settings(SimpleNamespace(tp_size=ranks))
