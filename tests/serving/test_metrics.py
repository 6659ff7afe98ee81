"""Totals as Prometheus reads them: as text, and from a registry."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from fastdraft import Source
from fastdraft.serving.metrics import FIELDS, SOURCES, Labels, Metric, Registry, exposition


def test_every_total_has_a_place() -> None:
    values = {field: 1000.0 + place for place, field in enumerate(FIELDS)}
    found = [
        sample.value
        for family in text_string_to_metric_families(exposition({"0": values}))
        for sample in family.samples
    ]
    assert sorted(found) == sorted(values.values())


def test_sources_are_those_of_drafts() -> None:
    assert (*(source.name.lower() for source in Source), "unknown") == SOURCES


def test_a_registry_shows_the_same_as_the_text() -> None:
    registry = CollectorRegistry()

    def make(metric: Metric, labels: Iterable[str]) -> Callable[[float, Labels], None]:
        kind = Counter if metric.kind == "counter" else Gauge
        made = kind(metric.name, metric.description, list(labels), registry=registry)
        change = "inc" if metric.kind == "counter" else "set"
        return lambda value, given: getattr(made.labels(**given), change)(value)

    adds = Registry(make)
    chance = random.Random(0)
    totals = {"0": dict.fromkeys(FIELDS, 0.0), "1": dict.fromkeys(FIELDS, 0.0)}
    for _ in range(4):
        for engine, values in totals.items():
            adds.report(engine, values)
        text = generate_latest(registry).decode()
        assert samples(text) == samples(exposition(totals))
        for values in totals.values():
            for field in chance.sample(FIELDS, 9):
                values[field] += chance.randint(1, 9)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


PROCESS = """
import sys
from fastdraft.serving.metrics import prometheus
for steps in (2, 5):
    prometheus().report(sys.argv[1], {"steps": steps, "requests": 7 - steps})
"""


def test_processes_of_one_host_share_a_folder_of_metrics(tmp_path: Path) -> None:
    """SGLang's scheduler counts in one process, its HTTP server shows the metrics in another."""
    variables = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for engine in ("0", "1"):
        subprocess.run([sys.executable, "-c", PROCESS, engine], check=True, env=variables)
    shown = CollectorRegistry()
    MultiProcessCollector(shown, path=str(tmp_path))
    values = {"steps": 5.0, "requests": 2.0}
    assert samples(generate_latest(shown).decode()) == samples(
        exposition({"0": values, "1": values})
    )
