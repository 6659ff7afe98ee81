"""vLLM on Ray Serve, as the example deploys it: two replicas share a memory.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has. Skipped
where Ray Serve is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fastdraft.serving.ledger import FOLDER_VARIABLE, LedgerReader
from fastdraft.serving.metrics import FIELDS, NAMESPACES, hits_field

serve = pytest.importorskip(
    "ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'"
)
import ray  # noqa: E402 - where it is installed
from ray.serve.scripts import cli  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
QUESTION = [{"role": "user", "content": "Write a few sentences about a cat."}]
TOKENS = 24
READ_ONLY = [hits_field(each, "read_only") for each in NAMESPACES]
FAULTS = ("faults", "publish_faults", "follow_faults")


@dataclass(frozen=True)
class Fleet:
    client: openai.OpenAI
    ledgers: Path
    """The folder to which the engines of all replicas write their counts."""

    def ask(self, **options: Any) -> Any:
        return self.client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=TOKENS, temperature=0.0, **options
        )

    def by_replica(self, *fields: str) -> Counter[str]:
        """The sums of these totals, by replica."""
        reader = LedgerReader(self.ledgers)
        reader.totals()
        places = [FIELDS.index(field) for field in fields]
        return +Counter({name: page.totals[places].sum() for name, page in reader._pages.items()})


def wait(until: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `until` returns, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := until()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("ray")
    url, port = f"file://{folder}/fleet", free_port()
    # A fixed cost, since a model of this size on a CPU hardly gains: measured, it drafts little.
    settings = {"memory_url": url, "shared_namespaces": ["everybody"], "token_cost": 0.01}
    variables = {
        "FASTDRAFT_MEMORY_KEY": "a key of the operator's",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # One process runs the engine and its worker, as on one GPU. On a CPU vLLM would start two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # On a busy machine a proxy may take long to start.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    }
    arguments = {
        "model": str(words),
        "served-model-name": "demo",
        "replicas": "2",
        "gpus": "0",
        "speculative-config": json.dumps({"method": "fastdraft", **settings}),
        "dtype": "float32",
        "max-model-len": "512",
        "kv-cache-memory-bytes": str(64 << 20),
        "enforce-eager": "true",
    }
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=300
    )
    command = ["run", "--non-blocking", "--app-dir", str(EXAMPLES), "vllm_on_ray:app"]
    command += [f"{name}={value}" for name, value in arguments.items()]
    ledgers = folder / "ledgers"
    ledgers.mkdir()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**variables, FOLDER_VARIABLE: str(ledgers)}.items():
            patch.setenv(name, value)  # before Ray starts, whose processes inherit it
        patch.syspath_prepend(EXAMPLES)
        ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
        stack.callback(ray.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        # `serve run`, which ends once the replicas are ready.
        cli.main(command, standalone_mode=False)
        stack.callback(serve.shutdown)
        yield Fleet(client, ledgers)


def test_one_replica_drafts_from_what_another_said(fleet: Fleet) -> None:
    # All requests read what this one says, by its namespace; none of those that follow writes to a
    # namespace of another.
    first = fleet.ask(extra_body={"vllm_xargs": {"fastdraft_namespace": "everybody"}})
    text = first.choices[0].message.content
    [writer] = wait(lambda: fleet.by_replica("published_tokens"))
    assert fleet.by_replica("published_tokens")[writer] >= TOKENS

    def answered() -> Counter[str]:
        salt = os.urandom(8).hex()
        answer = fleet.ask(extra_body={"cache_salt": salt})
        assert answer.choices[0].message.content == text
        hits = fleet.by_replica(*READ_ONLY)
        return Counter({name: count for name, count in hits.items() if name != writer and count})

    [(reader, hits)] = wait(answered, 240).items()
    assert reader != writer and hits > TOKENS // 2
    assert not fleet.by_replica(*FAULTS)


def test_predictions_are_counted_in_answers_of_both_replicas(fleet: Fleet) -> None:
    salt = {"cache_salt": "of this test"}
    text = fleet.ask(extra_body=salt).choices[0].message.content
    prediction = {"type": "content", "content": text}
    name = "accepted_prediction_tokens"
    before = sum(fleet.by_replica(name).values())

    def counted(least: int) -> bool:
        return sum(fleet.by_replica(name).values()) - before >= least

    accepted = 0
    replicas: set[str] = set()
    # Ray Serve chooses a replica at random where both are idle; it is some seconds until one tells.
    for _ in range(5):
        if len(replicas) == 2:
            break
        for _ in range(6):
            answer = fleet.ask(extra_body=salt, prediction=prediction)
            assert answer.choices[0].message.content == text
            details = answer.usage.completion_tokens_details
            assert details.accepted_prediction_tokens > 0
            accepted += details.accepted_prediction_tokens
        wait(functools.partial(counted, accepted), 30)
        replicas = {replica for replica, count in fleet.by_replica(name).items() if count}
    assert len(replicas) == 2
    # The model may verify tokens past the end of an answer.
    assert sum(fleet.by_replica(name).values()) - before < accepted + 16 * 20
