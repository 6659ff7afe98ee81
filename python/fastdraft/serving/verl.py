"""verl's router of rollouts to replicas, chosen by a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from fastdraft.errors import InvalidValueError
from fastdraft.serving.routing import choose_server

__all__ = ["PromptRouter"]


class PromptRouter(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """verl's load balancer, with all samples of a prompt at one replica: see `choose_server`.

    `actor_rollout_ref.rollout.router_config_path` names a YAML file that has

        router_class: fastdraft.serving.verl.PromptRouter

    and `spread`, if it is to differ. The further turns of a request stay at its replica.

    Args:
        servers: The replicas' actors, by name.
        config: What the file has.

    Raises:
        InvalidValueError: Another option, or a bad value.
    """

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(servers)
        self._options = {name: config[name] for name in config if name != "router_class"}
        if not self._options.keys() <= {"spread"}:
            raise InvalidValueError(f"options must be among ['spread'], got {self._options}")
        choose_server([], {"": 0}, **self._options)

    def require_acquire_fields(self) -> list[str]:
        """The fields that verl passes to `acquire_server`."""
        return ["prompt_ids"]

    def acquire_server(self, request_id: str, prompt_ids: ArrayLike = ()) -> tuple[str, Any]:
        """The replica for a turn of a request, and its actor.

        Raises:
            RuntimeError: There is no replica.
        """
        loads, known = self._inflight_requests, self._request_id_to_server
        if loads and known.get(request_id) not in loads:
            known[request_id] = choose_server(prompt_ids, loads, **self._options)
        server, actor = super().acquire_server(request_id)
        return server, actor
