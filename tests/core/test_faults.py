"""Errors are counted, and each kind of them is logged."""

from __future__ import annotations

import logging

import pytest

from fastdraft.faults import Faults


def test_each_kind_is_logged_and_none_floods_the_log(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(logging.getLogger("test"))
    for _ in range(100):
        try:
            int("x")
        except ValueError:
            faults.add("the first kind")
    for error in (OSError("disk"), OSError("disk")):
        faults.add("the second kind", error)
    faults.add("the third kind")
    assert faults.count == 103
    assert [record.getMessage() for record in caplog.records] == [
        "fastdraft: the first kind",
        *(f"fastdraft: the first kind ({times} times so far)" for times in (2, 4, 8, 16, 32, 64)),
        "fastdraft: the second kind",
        "fastdraft: the second kind (2 times so far)",
        "fastdraft: the third kind",
    ]
    assert [record.exc_info is not None for record in caplog.records[-3:]] == [True, True, False]
