"""vLLM with fastdraft on Ray Serve: replicas that draft from one memory.

On all nodes: vllm, fastdraft[fleet,cli] and ray[serve], and before `ray start`
export FASTDRAFT_MEMORY_KEY=...

    serve run vllm_on_ray:app replicas=2 model=MODEL \
      speculative-config='{"method": "fastdraft", "memory_url": "s3://bucket/fastdraft"}'

All arguments but `replicas` and `gpus`, of each replica, are those of `vllm serve`.
"""

from __future__ import annotations

import json
from typing import Any

from ray import serve

DEFAULTS = {"speculative-config": json.dumps({"method": "fastdraft"})}


@serve.deployment(max_ongoing_requests=256, health_check_timeout_s=60)
@serve.ingress()
class Replica:
    """One vLLM server. Ray Serve passes HTTP requests on to its application."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    async def __serve_build_asgi_app__(self) -> Any:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(self.arguments)
        self.running = build_async_engine_client(args)
        self.engine = await self.running.__aenter__()
        tasks = await self.engine.get_supported_tasks()
        server = build_app(args, tasks, self.engine.model_config)
        await init_app_state(self.engine, server.state, args, tasks)
        return server

    async def check_health(self) -> None:
        await self.engine.check_health()


def app(arguments: dict[str, str]) -> serve.Application:
    """What `serve run` starts, from its arguments; `name=true` is the flag `--name`."""
    options = {**DEFAULTS, **arguments}
    replicas, gpus = int(options.pop("replicas", 1)), float(options.pop("gpus", 1))
    command = [
        f"--{name}" if value == "true" else f"--{name}={value}" for name, value in options.items()
    ]
    deployment = Replica.options(num_replicas=replicas, ray_actor_options={"num_gpus": gpus})
    return deployment.bind(command)
