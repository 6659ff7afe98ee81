"""fastdraft's metrics among those of a Ray cluster, from a replica of Ray Serve that runs vLLM.

Behind Ray Serve nobody can ask one replica for its /metrics. Ray's own exporter, on each node,
shows the metrics of all processes there, with the replica and the node as labels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from fastdraft.errors import InvalidValueError
from fastdraft.serving.ledger import FOLDER_VARIABLE, LedgerReader
from fastdraft.serving.metrics import Labels, Metric, Registry

__all__ = ["report_to_ray"]

_logger = logging.getLogger(__name__)


def report_to_ray(*, interval: float = 5.0) -> Callable[[], None]:
    """Reports what the engines of this process do as metrics of Ray, from now on.

    Call it where Ray runs the process, after vLLM's engine has started. The metrics are those of
    `/metrics`, with the label `replica`; Ray's exporter puts `ray_` before their names.

    Args:
        interval: The seconds between two looks.

    Returns:
        What ends it, after a last look. A process that ends without loses what the last `interval`
        counted.

    Raises:
        InvalidValueError: An interval of 0 or less, or no vLLM with fastdraft's entry point has
            started here.
        ModuleNotFoundError: ray is not installed.
    """
    if not interval > 0:
        raise InvalidValueError(f"interval must be greater than 0, got {interval}")
    ledgers = LedgerReader.from_environment()
    if ledgers is None:
        raise InvalidValueError(
            f"{FOLDER_VARIABLE} must be in the environment, got none: call this after vLLM has "
            "started, which loads fastdraft's entry point; if VLLM_PLUGINS is set, it must name "
            "fastdraft"
        )
    registry = Registry(_registered(_replica()))
    stop = threading.Event()

    def look() -> None:
        try:
            for engine, totals in ledgers.totals().items():
                registry.report(engine, totals)
        except Exception:
            _logger.warning("fastdraft: cannot report metrics to Ray", exc_info=True)

    def run() -> None:
        while not stop.wait(interval):
            look()
        look()

    thread = threading.Thread(target=run, name="fastdraft-ray-metrics", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


def _replica() -> str:
    """The id of this replica of Ray Serve; empty elsewhere."""
    try:
        from ray import serve
    except ImportError:  # Ray alone
        return ""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except serve.exceptions.RayServeException:
        return ""


def _registered(
    replica: str,
) -> Callable[[Metric, Iterable[str]], Callable[[float, Labels], None]]:
    from ray.util.metrics import Counter, Gauge

    def make(metric: Metric, labels: Iterable[str]) -> Callable[[float, Labels], None]:
        tags = (*labels, "replica")
        if metric.kind == "counter":
            counter = Counter(metric.name, metric.description, tags)

            def add(value: float, given: Labels) -> None:
                if value > 0:  # Ray takes no 0
                    counter.inc(value, {**given, "replica": replica})

            return add
        gauge = Gauge(metric.name, metric.description, tags)
        return lambda value, given: gauge.set(value, {**given, "replica": replica})

    return make
