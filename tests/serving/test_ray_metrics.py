"""Metrics in Ray's own registry. tests/hosts has them from replicas of Ray Serve."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdraft.errors import InvalidValueError
from fastdraft.serving.ledger import FOLDER_VARIABLE, Ledger
from fastdraft.serving.metrics import FIELDS, exposition
from fastdraft.serving.vllm.ray_metrics import report_to_ray

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fastdraft[ray]'")


def test_totals_become_metrics_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()

    class Recorded:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self.name, self.tag_keys = name, tag_keys

        def key(self, tags: dict[str, str]) -> Any:
            assert set(tags) == set(self.tag_keys) and tags["replica"] == ""
            return self.name, frozenset(tags.items())

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0  # as Ray's own counter asks
            found[self.key(tags)] += value

        def set(self, value: float, tags: dict[str, str]) -> None:
            found[self.key(tags)] = value

    monkeypatch.setattr("ray.util.metrics.Counter", Recorded)
    monkeypatch.setattr("ray.util.metrics.Gauge", Recorded)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ledgers = [Ledger(tmp_path, engine=number) for number in range(2)]
    end = report_to_ray(interval=0.001)
    totals = {}
    for number, ledger in enumerate(ledgers):
        for factor in (1, 2, 3):
            totals[str(number)] = {
                field: factor * (100.0 * number + place) for place, field in enumerate(FIELDS)
            }
            ledger.publish(totals[str(number)])
    end()
    shown = {
        (sample.name, frozenset({**sample.labels, "replica": ""}.items())): sample.value
        for family in text_string_to_metric_families(exposition(totals))
        for sample in family.samples
        if sample.value > 0
    }
    assert {key: value for key, value in found.items() if value > 0} == shown


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValueError, match="interval must be greater than 0, got 0"):
        report_to_ray(interval=0)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(InvalidValueError, match=f"{FOLDER_VARIABLE} must be in the environment"):
        report_to_ray()
