"""Work on a Ray cluster of two nodes, one of which is killed: the same as in one process."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from command_line import succeed
from fastdraft.errors import InvalidValueError
from fastdraft.memory.datastore import build
from fastdraft.replay.cluster import Cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fastdraft[ray]'")


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """A cluster of a head and one more node, with a core each."""
    from ray.cluster_utils import Cluster as LocalCluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = LocalCluster(
        initialize_head=True, head_node_args={**size, "include_dashboard": False}
    )
    cluster.add_node(**size)
    yield cluster
    cluster.shutdown()


def test_results_come_in_the_order_of_the_items_and_errors_as_raised(local: Any) -> None:
    def twice(item: int) -> Iterator[tuple[int, int]]:
        for number in range(item % 7):
            yield item, number

    def fail(item: int) -> Iterator[int]:
        yield item
        raise InvalidValueError(f"nothing may be {item}")

    with Cluster(local.address) as cluster:
        found = list(cluster.run(twice, range(20)))
        with pytest.raises(InvalidValueError, match=r"^nothing may be 3$"):
            list(cluster.run(fail, [3]))
    assert found == [(item, number) for item in range(20) for number in range(item % 7)]
    with pytest.raises(InvalidValueError, match="no Ray cluster answers at 'nowhere'"):
        Cluster("nowhere")


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[::1]:{}"])
def test_a_cluster_that_is_gone_is_refused_at_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise AssertionError("Ray tries for 40 seconds")

    monkeypatch.setattr("ray.init", init)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = form.format(free.getsockname()[1])  # bound, and nobody listens
        with pytest.raises(InvalidValueError, match=r"no Ray cluster answers at .*: .*refused"):
            Cluster(address)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_results_that_workers_have_ready_are_not_held_here(local: Any, tmp_path: Path) -> None:
    """Three items of 128 MB each, which is more than the object stores hold."""

    def held() -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    def work(item: int) -> Iterator[Any]:
        for number in range(16):
            yield np.full(8 << 20, 16 * item + number, np.uint8)
        (tmp_path / str(item)).touch()

    with Cluster(local.address) as cluster:
        before = held()
        results = cluster.run(work, range(3))
        numbers = [next(results)[0]]
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        assert held() - before < 32 << 20
        for content in results:
            numbers.append(content[0])
            assert (content == content[0]).all()
            assert held() - before < 32 << 20
    assert numbers == list(range(48))


def test_a_store_is_the_same(local: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({str(word): word for word in range(50)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    random = np.random.default_rng(0)
    inputs = []
    for number in range(6):
        inputs.append(tmp_path / f"{number}.txt")
        words = random.integers(0, 50, 20_000)
        inputs[-1].write_text("\n".join(map(str, words)))
    inputs.append(tmp_path / "6.jsonl")
    lines = [{"text": "1 2 3"}, {"text": [7, 8, 9]}, {"text": ""}, {"text": "4 5"}]
    inputs[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.save(tmp_path / "7.npy", random.integers(0, 50, (30, 100)))
    inputs.append(tmp_path / "7.npy")
    option = ("--tokenizer", tmp_path / "tokenizer.json")
    succeed("datastore", "build", tmp_path / "one.fds", *inputs, *option)
    ray = (tmp_path / "ray.fds", *inputs, *option, "--ray", local.address)
    succeed("datastore", "build", *ray)
    assert (tmp_path / "ray.fds").read_bytes() == (tmp_path / "one.fds").read_bytes()


def test_a_replay_counts_the_same(local: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in "abc":
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(12):
                prompt, output = random.integers(0, 20, (2, 60)).tolist()
                record = {
                    "id": str(number),
                    "prompt_ids": prompt,
                    "output_ids": prompt[:40] + output,
                }
                file.write(json.dumps(record) + "\n")
    build(tmp_path / "store.fds", [random.integers(0, 20, 500)])
    counts = []
    for number, more in enumerate(([], ["--ray", local.address])):
        path = tmp_path / f"{number}.json"
        succeed(
            *("replay", tmp_path, "--datastore", tmp_path / "store.fds"),
            *("--drafter", "default", "--drafter", "ngram"),
            *("--token-cost", 0, "--token-cost", 0.05),
            *("--at-once", 2, "--json", path, "--html", path.with_suffix(".html"), *more),
        )
        runs = json.loads(path.read_text())["runs"]
        for run in runs:
            for family in run["families"].values():
                for timed in [key for key in family if "_ns" in key]:
                    del family[timed]
        counts.append(runs)
        assert path.with_suffix(".html").stat().st_size > 1000
    assert counts[0] == counts[1]
    assert len(counts[0]) == 4 and set(counts[0][0]["families"]) == set("abc")


def test_a_node_that_is_killed_changes_nothing(local: Any) -> None:
    """The last test: afterwards there is one node."""
    [node] = local.worker_nodes

    def work(item: int) -> Iterator[tuple[int, int, Any]]:
        for number in range(10):
            time.sleep(0.05)
            # Ray keeps large results on the node that made them, so they are lost with it.
            yield item, number, np.full(1 << 16, item * number)

    with Cluster(local.address) as cluster:
        found = []
        for item, number, content in cluster.run(work, range(6)):
            if (item, number) == (0, 5):
                local.remove_node(node, allow_graceful=False)
            assert (content == item * number).all()
            found.append((item, number))
    assert found == [(item, number) for item in range(6) for number in range(10)]
