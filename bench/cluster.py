"""Building a frozen datastore on a Ray cluster: time and memory by workers.

The text is made of stretches of real source code, and comes as text or as token ids. Each worker is
a node of its own on this machine, with one core; the command that builds is not among them. Without
workers it is one process without Ray, which tokenises on one core as well.

    python bench/cluster.py --tokenizer FOLDER --megabytes 400 --json bench/results/cluster.json
    python bench/cluster.py --ids 1000000000
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import corpus
import datastore
import harness
from datastore import DOCUMENT
from fastdraft.files import sha256
from harness import Row

FILES = 16
STRETCH = 4000  # characters


def write_texts(folder: Path, megabytes: int) -> list[Path]:
    """Files of `megabytes` in all, UTF-8."""
    text = "".join(corpus._texts())
    chance = random.Random(0)
    paths = [folder / f"{number:02d}.txt" for number in range(FILES)]
    for path in paths:
        with path.open("w", encoding="utf-8") as file:
            for _ in range(megabytes * 1_000_000 // FILES // STRETCH):
                start = chance.randrange(len(text) - STRETCH)
                file.write(text[start : start + STRETCH])
    return paths


def write_ids(folder: Path, count: int) -> list[Path]:
    """Files of `count` token ids in all, as bench/datastore.py makes them, a document a row."""
    text = corpus.tokens(1_000_000)
    paths = [folder / f"{number:02d}.npy" for number in range(FILES)]
    for seed, path in enumerate(paths):
        made = path.with_suffix(".bin")
        datastore.synthesise(made, text, count // FILES // DOCUMENT * DOCUMENT, seed)
        np.save(path, np.fromfile(made, np.int32).reshape(-1, DOCUMENT))
        made.unlink()
    return paths


def workers_bytes() -> int:
    """The memory of Ray's workers, what they share counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::"):
                rollup = (process / "smaps_rollup").read_text()
                total += 1024 * int(re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)[0])
        except OSError:
            continue  # it has ended
    return total


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had at once, so far; 0: it has ended.

    What `os.wait4` says of a child is at least what its parent had when it started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.findall(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)
    return 1024 * int(found[0]) if found else 0


def measure(inputs: list[Path], out: Path, tokenizer: Path | None, workers: int) -> Row:
    """One build, with a cluster of so many workers; 0: without Ray."""
    command = [sys.executable, "-m", "fastdraft.cli", "datastore", "build", str(out)]
    command += map(str, inputs)
    if tokenizer is not None:
        command += ["--tokenizer", str(tokenizer)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    cluster: Any = None
    if workers:
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(workers):
            cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
        command += ["--ray", cluster.address]
    command_peak = workers_peak = 0
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            command_peak = max(command_peak, peak_bytes(process.pid))
            if workers:
                workers_peak = max(workers_peak, workers_bytes())
            time.sleep(0.2)
        seconds = time.perf_counter() - begin
        assert process.stdout is not None
        said = process.stdout.read()
    if cluster is not None:
        cluster.shutdown()
    assert process.returncode == 0, said
    tokens = int(re.findall(r"([\d,]+) tokens", said)[0].replace(",", ""))
    return {
        "workers": workers,
        "tokens": tokens,
        "seconds": seconds,
        "us_a_token": seconds * 1e6 / tokens,
        "command_peak_rss_bytes": command_peak,
        "workers_peak_pss_bytes": workers_peak,
        "file_bytes": out.stat().st_size,
        "sha256": sha256(out),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER")
    parser.add_argument("--megabytes", type=int, default=400, help="of text")
    parser.add_argument("--ids", type=int, metavar="COUNT", help="token ids in place of text")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options: argparse.Namespace = parser.parse_args()
    if (options.tokenizer is None) == (options.ids is None):
        parser.error("either --tokenizer or --ids must be given")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    about = harness.about()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.ids is None:
            inputs = write_texts(Path(folder), options.megabytes)
        else:
            inputs = write_ids(Path(folder), options.ids)
        for workers in options.workers:
            rows.append(measure(inputs, Path(folder) / "out.fds", options.tokenizer, workers))
            print(rows[-1], flush=True)
    assert len({row["sha256"] for row in rows}) == 1, "the files differ"
    harness.finish(options, {**about, "runs": rows})


if __name__ == "__main__":
    main()
