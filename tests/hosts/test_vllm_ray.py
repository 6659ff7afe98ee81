"""vLLM on Ray Serve, as the example deploys it: two replicas on two nodes share a memory.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has. Skipped
where Ray Serve is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
QUESTION = [{"role": "user", "content": "Write a few sentences about a cat."}]
# The commands `serve` and `fastdraft` of this Python.
SERVE = (sys.executable, "-c", "from ray.serve.scripts import cli; cli()")
FASTDRAFT = (sys.executable, "-c", "from fastdraft.cli import main; main()")
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


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which is ended with the block; what it started goes with its cluster."""
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, with one CPU each."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = {**size, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**size)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("ray")
    log, url, port = folder / "log", f"file://{folder}/fleet", free_port()
    # A fixed cost, since a model of this size on a CPU hardly gains: measured, it drafts little.
    settings = {"memory_url": url, "shared_namespaces": ["everybody"], "token_cost": 0.01}
    variables = {
        "FASTDRAFT_MEMORY_KEY": "a key of the operator's",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # One process runs the engine and its worker, as on one GPU. On a CPU vLLM would start two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Requests go to replicas of both nodes, and not to the nearer one while it has room.
        "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
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
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in variables.items():
            patch.setenv(name, value)  # before the nodes start, whose processes inherit it
        ledgers = folder / "ledgers"
        ledgers.mkdir()
        patch.setenv(FOLDER_VARIABLE, str(ledgers))
        address = stack.enter_context(two_nodes())
        patch.setenv("RAY_ADDRESS", address)
        import ray

        ray.init(address)
        stack.callback(ray.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        command = [*SERVE, "run", "--app-dir", str(EXAMPLES), "vllm_on_ray:app"]
        command += [f"{name}={value}" for name, value in arguments.items()]
        serving = stack.enter_context(running(command, log))

        def serves() -> bool:
            said = log.read_text()
            assert serving.poll() is None and "Traceback" not in said, said[-6000:]
            with contextlib.suppress(openai.APIError):
                return bool(client.models.list().data)
            return False

        try:
            wait(serves, 420)
            yield Fleet(client, ledgers)
        finally:
            print(log.read_text()[-6000:])  # shown where a test fails


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


def test_predictions_are_counted_in_answers_of_both_nodes(fleet: Fleet) -> None:
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
