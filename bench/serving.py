"""vLLM with each way to draft: plain, its n-gram drafters, Arctic's suffix decoding, fastdraft.

    python bench/serving.py --data FOLDER --json bench/results/serving_live.json

Runs in vLLM's environment, with fastdraft installed there. `--model` is the target's folder; its
tokenizer cuts the recorded requests.

Each way has a real server, which vLLM's own `vllm bench serve` drives. A run starts a server for
each method, one after the other, drives it with the run's requests, and ends it. So each begins
without memory, and what else the machine does meets all methods alike. All methods get the same
requests; each run has others, greedy ones. Workloads are

- recorded: requests of all families in turn, none twice, without those of sessions;
- agents: requests of sessions, and then the same a second time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import baselines
import harness
from fastdraft.replay import Record, read_families
from fastdraft.replay.samples import read_sample
from fastdraft.replay.tokenizer import TextTokenizer
from harness import Row, show

NGRAM = {"prompt_lookup_max": 4, "num_speculative_tokens": 5}
METHODS: Mapping[str, tuple[Row | None, str | None]] = {
    "plain": (None, None),
    "ngram": ({"method": "ngram", **NGRAM}, None),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 32}, None),
    "fastdraft-v1": ({"method": "fastdraft"}, "0"),
    "ngram_gpu": ({"method": "ngram_gpu", **NGRAM}, None),
    "fastdraft-v2": ({"method": "fastdraft"}, "1"),
}
"""vLLM's `speculative_config`, for peers as its documentation has it, and the model runner where
vLLM is not to choose it. On a CPU the last two need Triton's interpreter."""
FIGURES = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "spec_decode_acceptance_length",
    "tokens_per_step",
    "tokens_per_processor_second",
)
"""vLLM's names, but for the last two: tokens of a request in each step after its first, and tokens
by the processor time of the server's processes, which other processes disturb less."""
TEMPLATE = 128  # tokens that a chat template may add

Place = tuple[str, int]
"""A workload and the number of requests at once."""


class Server(NamedTuple):
    """One that runs."""

    url: str
    process: int
    log: Path

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's metrics over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def steps(self) -> float:
        """Steps of requests after their first, added up over the requests."""
        return self.metric("vllm:inter_token_latency_seconds_count")

    def drafter(self) -> str | None:
        """What the log says of fastdraft; None where nothing is logged of it."""
        said = re.search("fastdraft [0-9.]+ drafts: (.*)", self.log.read_text("utf-8"))
        return said and said[1]

    def processor_seconds(self) -> float:
        times = [each.cpu_times() for each in family(self.process)]
        return float(sum(each.user + each.system for each in times))


@contextlib.contextmanager
def serving(
    method: tuple[Row | None, str | None], folder: Path, options: argparse.Namespace
) -> Iterator[Server]:
    """A server, until the block ends; it logs to a file in `folder`."""
    speculative, runner = method
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
        "--model", options.model, "--max-num-seqs", str(max(options.rows)),
        "--max-model-len", str(options.prompt_tokens + options.new_tokens + TEMPLATE),
    ]  # fmt: skip
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    if runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = runner
    log = folder / "server.log"
    process = start([*command, *shlex.split(options.serve)], environment, log)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"the server does not start:\n{log.read_text()[-4000:]}")
        yield Server(url, process.pid, log)
    finally:
        engines = family(process.pid) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for each in engines:
            if each.is_running():
                each.kill()


def family(process: int) -> list[Any]:
    """A process, and all that it has started."""
    import psutil

    first = psutil.Process(process)
    return [first, *first.children(recursive=True)]


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
    """Starts a server's process, which ends with this one's group."""
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def drive(server: Server, *arguments: object) -> Row:
    """What `vllm bench serve` finds with these arguments."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    given = ["--base-url", server.url, "--temperature", "0", "--save-detailed", "--disable-tqdm"]
    given += map(str, arguments)
    steps, seconds = server.steps(), server.processor_seconds()
    with contextlib.redirect_stdout(sys.stderr):
        found: Row = asyncio.run(serve.main_async(parser.parse_args(given)))
    if found["failed"]:
        raise SystemExit(f"requests failed: {next(filter(None, found['errors']))}")
    tokens = found["total_output_tokens"]
    seconds, steps = server.processor_seconds() - seconds, server.steps() - steps
    found["tokens_per_step"] = (tokens - found["completed"]) / max(1.0, steps)
    return {**found, "tokens_per_processor_second": tokens / seconds}


def ensure_suffix() -> None:
    """Makes Arctic's suffix decoding importable here and in servers, or ends the program."""
    if importlib.util.find_spec("arctic_inference") is None:
        failures = baselines.ensure()
        if importlib.util.find_spec("arctic_inference") is None:
            raise SystemExit(f"suffix decoding is not available: {failures}")
        # The part of vLLM beside it is a namespace: vLLM itself comes before, wherever it is.
        paths = [str(baselines.PACKAGES), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def measure(
    families: Mapping[str, Sequence[Record]],
    options: argparse.Namespace,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> Row:
    """Every method, with every workload, at every number of requests at once.

    keep: Called after each run with the rows so far.
    """
    methods = dict(METHODS)
    if options.head is not None:
        beside = {"method": "fastdraft", "head": options.head}
        methods |= {"head": (options.head, None), "fastdraft-head": (beside, "1")}
    here = list(methods) if torch.cuda.is_available() else list(methods)[:4]
    names = options.methods or here
    places = list(itertools.product(options.workloads, options.rows))
    runs: dict[Place, dict[str, list[Row]]] = {
        place: {name: [] for name in names} for place in places
    }
    rows: list[Row] = []
    drafters: dict[str, str] = {}
    if "suffix" in names:
        ensure_suffix()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sets = _Sets(families, options, folder)
        warm_up = sets.written("warm-up", sets.take("recorded", options.warm_up))
        chosen = {
            (run, place): sets.chosen(run, *place)
            for run, place in itertools.product(range(options.runs), places)
        }
        for run in range(options.runs):
            first = run % len(names)
            for name in names[first:] + names[:first]:
                with serving(methods[name], folder, options) as server:
                    drive(server, *warm_up, "--output-len", options.new_tokens)
                    for place in places:
                        lengths = "--output-len", options.new_tokens, "--max-concurrency", place[1]
                        found = drive(server, *chosen[run, place], *lengths)
                        runs[place][name].append(found)
                        speed = f"{found['output_throughput']:.1f} tokens/s"
                        print("...", run, name, *place, speed, file=sys.stderr, flush=True)
                    if said := server.drafter():
                        drafters[name] = said
            rows = [
                {"workload": workload, "rows": at_once, **summary(of)}
                for (workload, at_once), of in runs.items()
            ]
            keep(rows)
    for row in rows:
        show_row(row, names)
    named = {name: methods[name][0] for name in names}
    return {"methods": named, "drafters": drafters, "rows": rows}


def show_row(row: Row, names: Sequence[str]) -> None:
    """Prints a table of the methods."""
    each = [{"method": name, **row[name]} for name in names]
    for figures in each:
        for key, value in figures.items():
            if isinstance(value, list):
                figures[key] = "{:.3g} ({:.3g} to {:.3g})".format(*value)
    columns = ["method", *FIGURES, "output_throughput_of_plain", "equal", "answers"]
    headings = {key.replace("_", "\n"): key for key in columns}
    title = f"{row['workload']}, {row['rows']} at once: median (lowest to highest)"
    show(title, headings, each)


def summary(runs: Mapping[str, Sequence[Row]]) -> Row:
    """For each method the median of each figure over its runs, the lowest and the highest.

    Beside a method named plain, also those of speeds as multiples of plain's in the same run, and
    how many answers are the same.
    """
    found: Row = {}
    plain = runs.get("plain")
    for name, results in runs.items():
        known = [key for key in FIGURES if all(key in each for each in results)]
        found[name] = {key: _spread([each[key] for each in results]) for key in known}
        if plain is not None:
            pairs = list(zip(results, plain, strict=True))
            for key in ("output_throughput", "tokens_per_processor_second"):
                ratios = [each[key] / base[key] for each, base in pairs]
                found[name][f"{key}_of_plain"] = _spread(ratios)
            said, expected = (
                [text for each in side for text in each["generated_texts"]]
                for side in (results, plain)
            )
            found[name]["equal"] = sum(map(str.__eq__, said, expected))
            found[name]["answers"] = len(expected)
    return found


def _spread(values: Sequence[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def prompts_of(
    families: Mapping[str, Sequence[Record]], options: argparse.Namespace
) -> dict[str, Iterator[str]]:
    """The prompts of recorded requests, families in turn: those of no session, and of sessions."""
    sampled = options.data is None
    decode = read_sample().decode if sampled else TextTokenizer(Path(options.model)).decode
    agents: list[Record] = []
    others: list[list[Record]] = []
    for records in families.values():
        short = [each for each in records if len(each.prompt_ids) <= options.prompt_tokens]
        agents += [each for each in short if each.session is not None]
        others.append([each for each in short if each.session is None])
    mixed = filter(None, itertools.chain(*itertools.zip_longest(*others)))
    return {
        name: (decode(each.prompt_ids.tolist()) for each in records)
        for name, records in (("recorded", mixed), ("agents", agents))
    }


class _Sets:
    """Requests for vLLM's data sets; each is taken once."""

    def __init__(
        self, families: Mapping[str, Sequence[Record]], options: argparse.Namespace, folder: Path
    ) -> None:
        self._options, self._folder = options, folder
        self._waiting = prompts_of(families, options)

    def take(self, workload: str, count: int) -> list[str]:
        """The next prompts of a workload."""
        texts = list(itertools.islice(self._waiting[workload], count))
        if len(texts) < count:
            raise SystemExit(
                f"too few requests for {workload} have at most {self._options.prompt_tokens} "
                "tokens; allow longer ones, or ask for fewer"
            )
        return texts

    def written(self, name: str, texts: Sequence[str]) -> list[Any]:
        """vLLM's options for a data set of these prompts, in their order."""
        file = self._folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), "utf-8")
        kind = ["--dataset-name", "custom", "--dataset-path", file, "--disable-shuffle"]
        return [*kind, "--num-prompts", len(texts)]

    def chosen(self, run: int, workload: str, at_once: int) -> list[Any]:
        """vLLM's options for the data set of one measurement."""
        options = self._options
        count = max(2 * at_once, options.least_requests)
        twice = 2 if workload == "agents" else 1
        texts = self.take(workload, count // twice) * twice
        return self.written(f"{workload}-{run}-{at_once}", texts)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of a measurement."""
    made = harness.parser(doc)
    add = made.add_argument
    add(
        "--model",
        default=os.environ.get("FASTDRAFT_DEMO_MODEL"),
        required="FASTDRAFT_DEMO_MODEL" not in os.environ,
        help="folder of the target; by default what FASTDRAFT_DEMO_MODEL names",
    )
    add("--data", type=Path, help="recorded requests, *.jsonl (the sample: for a rehearsal)")
    add("--methods", nargs="+", help="by default all that run here")
    add("--head", type=json.loads, help="vLLM's configuration of a draft head, alone and beside us")
    workloads = ["recorded", "agents"]
    add("--workloads", nargs="+", choices=workloads, default=workloads)
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="requests at once")
    add("--runs", type=int, default=3, help="of each method, in turn")
    add("--new-tokens", type=int, default=256, help="of each answer, at most")
    add("--prompt-tokens", type=int, default=4096, help="longer ones are left out")
    add("--least-requests", type=int, default=8, help="in a measurement")
    add("--warm-up", type=int, default=8, help="requests: what is compiled then takes long")
    add("--serve", default="", help="further options of `vllm serve`, in one string")
    return made


def families_of(options: argparse.Namespace) -> Mapping[str, Sequence[Record]]:
    """The recorded requests that the options name."""
    if options.data is None:
        return read_sample().families
    return read_families([options.data], TextTokenizer(Path(options.model)).encode)


def main() -> None:
    options = parser(__doc__).parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = harness.about()
    harness.finish(options, results | measure(families_of(options), options))


if __name__ == "__main__":
    main()
