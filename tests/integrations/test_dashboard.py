"""The dashboard asks for metrics that are there, with the labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdraft.integrations.vllm.ledger import Totals
from fastdraft.integrations.vllm.metrics import exposition

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
PANELS = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def scraped() -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each sample, as Prometheus reads them."""
    text = exposition({"0": Totals(*range(len(Totals._fields))), "1": Totals()})
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


def test_every_metric_is_on_the_dashboard() -> None:
    asked = set(re.findall(r"fastdraft_\w+", " ".join(QUERIES)))
    assert asked == set(scraped())


def test_every_total_has_a_place() -> None:
    values = {field: 1000.0 + place for place, field in enumerate(Totals._fields)}
    found = [
        sample.value
        for family in text_string_to_metric_families(exposition({"0": Totals(**values)}))
        for sample in family.samples
    ]
    assert sorted(found) == sorted(values.values())
