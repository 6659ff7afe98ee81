"""The dashboard asks for metrics that are there, with the labels that they have."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from fastdraft.serving.metrics import FIELDS, Labels, Metric, Registry, exposition
from programs import run_python

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
PANELS = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def scraped() -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each sample, as Prometheus reads them."""
    text = exposition({"0": dict(zip(FIELDS, range(len(FIELDS)), strict=True)), "1": {}})
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[sample.name] = (family.type, set(sample.labels))
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_is_there(query: str) -> None:
    metrics = scraped()
    names = re.findall(r"fastdraft_\w+", query)
    assert names
    for name in names:
        kind, labels = metrics[name]
        rated = f"({name}[" in query
        assert rated == (kind == "counter"), f"{name} is a {kind}"
        for by in re.findall(r"by \(([^)]*)\)", query):
            assert set(by.replace(" ", "").split(",")) <= labels
    assert query.count("(") == query.count(")")


def labels_of(query: str) -> set[str] | None:
    """The labels of what a query gives, None for a scalar; an operator takes only equal ones.

    Of two vectors whose labels differ Prometheus pairs nothing, and the answer is empty.
    """
    parts, depth = [""], 0
    for word in re.split(r"( [-+*/] |[()])", query):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and re.fullmatch(r" [-+*/] ", word):
            parts.append("")
        else:
            parts[-1] += word
    if len(parts) > 1:
        found = [labels for part in parts if (labels := labels_of(part)) is not None]
        assert all(labels == found[0] for labels in found), query
        return found[0]
    called = re.fullmatch(r"(\w*)(?: by \((.*?)\) )?\((.*)\)", query)
    if called is None:
        return scraped()[query.removesuffix("[5m]")][1] | {"instance"}
    function, by, inner = called.groups()
    labels = labels_of(inner)
    if function in ("sum", "max"):
        return set(by.split(", ")) if by else set()
    assert function in ("", "rate", "increase", "scalar"), query
    return None if function == "scalar" else labels


@pytest.mark.parametrize("query", QUERIES)
def test_operands_of_a_query_have_the_same_labels(query: str) -> None:
    labels_of(query)


def test_labels_that_differ_are_found() -> None:
    assert labels_of("scalar(max(fastdraft_requests)) - fastdraft_requests") == {
        "engine",
        "instance",
    }
    with pytest.raises(AssertionError):
        labels_of("max(fastdraft_requests) - fastdraft_requests")


def test_every_metric_is_on_the_dashboard() -> None:
    asked = set(re.findall(r"fastdraft_\w+", " ".join(QUERIES)))
    assert asked == set(scraped())


def test_every_total_is_shown() -> None:
    values = {field: 1000.0 + index for index, field in enumerate(FIELDS)}
    found = [
        sample.value
        for family in text_string_to_metric_families(exposition({"0": values}))
        for sample in family.samples
    ]
    assert sorted(found) == sorted(values.values())


def test_a_registry_shows_the_same_as_the_text() -> None:
    registry = CollectorRegistry()

    def make(metric: Metric, labels: Iterable[str]) -> Callable[[float, Labels], None]:
        kind = Counter if metric.kind == "counter" else Gauge
        made = kind(metric.name, metric.description, list(labels), registry=registry)
        change = "inc" if metric.kind == "counter" else "set"
        return lambda value, given: getattr(made.labels(**given), change)(value)

    adds = Registry(make)
    random_ = random.Random(0)
    totals = {"0": dict.fromkeys(FIELDS, 0.0), "1": dict.fromkeys(FIELDS, 0.0)}
    for _ in range(4):
        for engine, values in totals.items():
            adds.report(engine, values)
        text = generate_latest(registry).decode()
        assert samples(text) == samples(exposition(totals))
        for values in totals.values():
            for field in random_.sample(FIELDS, 9):
                values[field] += random_.randint(1, 9)


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
        run_python(PROCESS, engine, env=variables)
    shown = CollectorRegistry()
    MultiProcessCollector(shown, path=str(tmp_path))
    values = {"steps": 5.0, "requests": 2.0}
    assert samples(generate_latest(shown).decode()) == samples(
        exposition({"0": values, "1": values})
    )
