"""Work over many files on a Ray cluster."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

from fastdraft.errors import InvalidValueError

__all__ = ["Cluster"]

# How long the head of a cluster may take to answer, in seconds.
_PATIENCE = 5.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray cluster, which runs a function for many items on all of its nodes.

    Ray schedules the tasks, moves what they return, and runs a task again where its node is lost.
    fastdraft must be installed on all nodes, in the same version, and files must be there under the
    same paths. A process uses one cluster at a time.

    Args:
        address: As `ray.init` takes it: "auto", or the address of the head, such as
            "10.0.0.1:6379".

    Raises:
        InvalidValueError: No cluster answers there.
        ModuleNotFoundError: ray is not installed.
    """

    def __init__(self, address: str) -> None:
        import ray

        try:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidValueError(f"no Ray cluster answers at {address!r}: {error}") from error
        self._ray: Any = ray

    def run(
        self, function: Callable[[_Item], Iterator[_Result]], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """Yields what the function yields for each item, in the order of the items.

        As many items are begun as the cluster has CPUs, and one more. What they yield waits in
        Ray's object stores, which move to disks what memory does not hold.

        Args:
            function: What to run, with one CPU. It must always yield the same for an item: it is
                run again where its node is lost.
            items: Its arguments.

        Raises:
            What the function raises.
        """
        # No task may wait until its results are taken: it would keep the CPU that an earlier item
        # needs when its node is lost.
        task = self._ray.remote(num_cpus=1, num_returns="streaming")(function)
        most = 1 + int(self._ray.cluster_resources().get("CPU", 1))
        begun: deque[Any] = deque()
        left = iter(items)
        while True:
            begun += (task.remote(item) for item in islice(left, most - len(begun)))
            if not begun:
                return
            for result in begun.popleft():
                try:
                    yield self._ray.get(result)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None

    def close(self) -> None:
        """Leaves the cluster, which goes on."""
        self._ray.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_answer(address: str) -> None:
    """Raises OSError where an address with a port cannot be reached: Ray tries for 40 seconds."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
