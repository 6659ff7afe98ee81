"""Datastores: building a frozen one, lookups, and what readers wait for a writer.

The text is made of stretches of real tokens, drawn from all over them, in which every eighth token
is replaced by another one of the text: n-grams repeat as often as they do in real text of this
size, and documents differ. The last 200,000 tokens stand in no store; lookups are made with
them. `bench_datastore` is what CMake builds of bench/cpp/datastore.cc (`make bench`).

    python bench/datastore.py --tokens tokens.bin --core build/release/bench_datastore
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import corpus
import harness
from fastdraft.memory.datastore import Datastore, DatastoreWriter
from fastdraft.replay.measurement import results_text

DOCUMENT = 2_000
QUERY_TOKENS = 200_000
COLD_LOOKUPS = 1_000


def synthesise(path: Path, text: NDArray[np.int32], count: int, seed: int = 0) -> None:
    """Writes `count` tokens, documents of `DOCUMENT` one after another, int32."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        for _ in range(0, count, 1000 * DOCUMENT):
            starts = random.integers(0, len(text) - DOCUMENT, 1000)
            tokens = text[starts[:, None] + np.arange(DOCUMENT)]
            replaced = random.random(tokens.shape) < 1 / 8
            tokens[replaced] = text[random.integers(0, len(text), int(replaced.sum()))]
            tokens.tofile(file)
        file.truncate(count * 4)


def build(tokens: Path, path: Path, count: int) -> dict[str, float]:
    """Writes the frozen store of the first `count` tokens; in a process of its own."""
    begin = time.perf_counter()
    with tokens.open("rb") as file, DatastoreWriter(path) as writer:
        for start in range(0, count, DOCUMENT):
            writer.begin_document()
            writer.append(np.fromfile(file, np.int32, min(DOCUMENT, count - start)))
    seconds = time.perf_counter() - begin
    return {
        "tokens": count,
        "seconds": seconds,
        "us_a_token": seconds * 1e6 / count,
        "file_bytes": path.stat().st_size,
        "bytes_a_token": path.stat().st_size / count,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def cold_lookups(path: Path, queries: NDArray[np.int32], count: int) -> dict[str, float]:
    """Lookups at scattered places in a store of which nothing is in memory, and how often one had
    to wait for the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Datastore.open(path) as store:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        times: list[int] = []
        for end in np.random.default_rng(0).integers(32, len(queries), count).tolist():
            begin = time.perf_counter_ns()
            store.find(queries[end - 32 : end], most=4)
            times.append(time.perf_counter_ns() - begin)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    return {**harness.percentiles(times), "reads_a_lookup": faults / count}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--count", type=int, default=100_000_000, help="tokens of the frozen store")
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="real tokens, as bench/corpus.py writes them"
    )
    parser.add_argument("--core", type=Path, required=True, help="bench_datastore")
    arguments = parser.parse_args()
    report = harness.about()
    with tempfile.TemporaryDirectory() as folder:
        tokens, path = Path(folder, "tokens.bin"), Path(folder, "store.fds")
        text = corpus.tokens(1_000_000)
        if arguments.tokens is not None:
            text = np.fromfile(arguments.tokens, dtype=np.int32)
        synthesise(tokens, text, arguments.count + QUERY_TOKENS)
        report["build"] = harness.in_a_process(build, tokens, path, arguments.count)
        queries = np.fromfile(tokens, np.int32, offset=arguments.count * 4)
        report["python_lookup_cold"] = cold_lookups(path, queries, COLD_LOOKUPS)
        core = subprocess.run(
            [str(arguments.core), str(tokens), str(path)],
            check=True,
            capture_output=True,
            text=True,
        )
        report["core"] = json.loads(core.stdout)
    print(results_text(report))
    harness.finish(arguments, report)


if __name__ == "__main__":
    main()
