"""The metrics of all adapters: predictions, errors, hits, time, memory and the fleet.

Each adapter counts the same; how the counts reach Prometheus is the host's way: as text beside
vLLM's own, or through the host's registry, as SGLang's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from fastdraft import Source

__all__ = [
    "FIELDS",
    "SOURCES",
    "Labels",
    "Metric",
    "Registry",
    "Totals",
    "exposition",
    "hits_field",
    "prometheus",
]

Totals: TypeAlias = Mapping[str, float]
"""The counts of one engine since its start, and its present sizes: values of FIELDS, or of some."""

Labels: TypeAlias = Mapping[str, str]

NAMESPACES: Final = ("unnamed", "named", "apart")
"""The classes of namespaces: see `Text.namespace_class`."""

SOURCES: Final = (*(source.name.lower() for source in Source), "unknown")
"""The sources of draft tokens, and one for tokens that were drafted too long ago to know."""


class Metric(NamedTuple):
    """A metric: its name, its type, its help text, and its labels by field of the totals."""

    name: str
    kind: str
    description: str
    fields: Mapping[str, Labels]


def hits_field(namespace: str, source: str) -> str:
    """The field of accepted tokens of one class of namespaces, and of one source."""
    return f"{namespace}_{source}"


def _counter(field: str, description: str) -> Metric:
    return Metric(f"fastdraft_{field}_total", "counter", description, {field: {}})


def _gauge(field: str, description: str) -> Metric:
    return Metric(f"fastdraft_{field}", "gauge", description, {field: {}})


METRICS: Final = (
    _counter(
        "accepted_prediction_tokens", "Tokens drafted from predictions that the model emitted."
    ),
    _counter(
        "rejected_prediction_tokens", "Tokens drafted from predictions that the model did not emit."
    ),
    _counter("faults", "Steps or requests that went on without drafts because drafting raised."),
    _counter(
        "refused_requests",
        "Requests that went on without drafts because one of their own options was wrong.",
    ),
    _counter(
        "drafted_tokens",
        "Draft tokens of finished requests that the target verified, without padding.",
    ),
    _counter("steps", "Calls of the proposer."),
    _counter("seconds", "Time spent in calls of the proposer."),
    _gauge("requests", "Requests that the drafting engine holds."),
    _gauge("request_bytes", "Bytes of their indexes."),
    _gauge("datastore_bytes", "Bytes of the live datastores."),
    Metric(
        "fastdraft_accepted_tokens_total",
        "counter",
        "Draft tokens of finished requests that the model emitted.",
        {
            hits_field(namespace, source): {"namespace": namespace, "source": source}
            for namespace in NAMESPACES
            for source in SOURCES
        },
    ),
    Metric(
        "fastdraft_fleet_faults_total",
        "counter",
        "Errors of publishing the memory and of following what others published.",
        {f"{kind}_faults": {"kind": kind} for kind in ("publish", "follow")},
    ),
    _counter("published_tokens", "Tokens that this replica published."),
    _counter("dropped_tokens", "Tokens that were not published in time."),
    _gauge("published_bytes", "Bytes of the stores of what others published."),
)
"""All metrics."""

FIELDS: Final = tuple(field for metric in METRICS for field in metric.fields)
"""All fields of totals."""


def exposition(totals: Mapping[str, Totals]) -> str:
    """The totals, by engine, in Prometheus' text format, version 0.0.4."""
    lines = []
    for name, kind, description, fields in METRICS:
        lines.append(f"# HELP {name} {description}")
        lines.append(f"# TYPE {name} {kind}")
        for engine, values in totals.items():
            for field, labels in fields.items():
                shown = ",".join(f'{k}="{v}"' for k, v in {"engine": engine, **labels}.items())
                lines.append(f"{name}{{{shown}}} {float(values.get(field, 0.0))}")
    return "\n".join(lines) + "\n"


class Registry:
    """The metrics in another library's registry, which adds them to what it exports. Thread-safe.

    Args:
        make: Registers a metric with these labels. Returns what takes a value and its labels: of a
            counter the amount to add, 0 or more, and of a gauge the value.
    """

    def __init__(
        self, make: Callable[[Metric, Iterable[str]], Callable[[float, Labels], None]]
    ) -> None:
        self._writers = [
            (metric, make(metric, ("engine", *next(iter(metric.fields.values())))))
            for metric in METRICS
        ]
        self._before: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def report(self, engine: str, totals: Totals) -> None:
        """Brings the metrics of an engine to its totals; those that are not given stay, from 0 on.

        O(metrics).
        """
        with self._lock:
            for metric, write in self._writers:
                for field, labels in metric.fields.items():
                    before = self._before.get((engine, field))
                    value = float(totals.get(field, before or 0.0))
                    if value == before:
                        continue
                    self._before[engine, field] = value
                    if metric.kind == "counter":
                        value = max(value - (before or 0.0), 0.0)
                    write(value, {"engine": engine, **labels})


@functools.cache
def prometheus() -> Registry:
    """The metrics in this process's default registry of prometheus_client.

    A host whose processes share a folder of metrics (`PROMETHEUS_MULTIPROC_DIR`) exports those of
    all of them: import nothing of prometheus_client before it has set that.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
    """
    from prometheus_client import Counter, Gauge

    def make(metric: Metric, labels: Iterable[str]) -> Callable[[float, Labels], None]:
        if metric.kind == "counter":
            counter = Counter(metric.name, metric.description, list(labels))
            return lambda value, given: counter.labels(**given).inc(value)
        gauge = Gauge(metric.name, metric.description, list(labels), multiprocess_mode="mostrecent")
        return lambda value, given: gauge.labels(**given).set(value)

    return Registry(make)
