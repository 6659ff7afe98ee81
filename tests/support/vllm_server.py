"""A real vLLM server on the CPU, in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import openai

from forks import Forks
from vllm_forks import fork_workers

__all__ = ["KEY", "MODEL", "Server", "serving"]

MODEL = "demo"
KEY = "not-a-secret"


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=240
        )

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name, summed over their labels."""
        values: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if not line.startswith("#"):
                    sample, value = line.rsplit(" ", 1)
                    name = sample.split("{", 1)[0]
                    values[name] = values.get(name, 0.0) + float(value)
        return values

    def tokenize(self, text: str) -> list[int]:
        body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
        request = urllib.request.Request(
            f"{self.url}/tokenize", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]


@contextlib.contextmanager
def serving(
    forks: Forks,
    model: Path | str,
    folder: Path,
    settings: dict[str, object],
    *,
    spawn: bool = False,
    variables: Mapping[str, str] = os.environ,
    ledger: Path | None = None,
    frontend: Path | None = None,
    log_texts: bool = False,
) -> Iterator[Server]:
    """A server that drafts with settings of fastdraft, until the block ends.

    spawn: Start the engine's process anew, as vLLM does on a CPU; it is forked otherwise.
    variables: Of its environment.
    ledger: The folder of its ledgers; None for one of its own.
    frontend: The program of vLLM's frontend in Rust; None for the one in Python.
    log_texts: True if the log has prompts and answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "--model": str(model),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--api-key": KEY,
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "32",
        "--kv-cache-memory-bytes": str(256 << 20),
        # A tiny model says spaces where it may.
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }
    speculative = {"method": "fastdraft", "num_speculative_tokens": 8, **settings}
    arguments["--speculative-config"] = json.dumps(speculative)
    log = ["--enable-log-requests", "--enable-log-outputs"] if log_texts else []
    # Endpoints for token ids are among those.
    command = ["--enforce-eager", "--enable-scale-out", *log, *itertools.chain(*arguments.items())]
    server = Server(f"http://127.0.0.1:{port}", folder / "server.log")
    environment = {
        **variables,
        "VLLM_LOGGING_LEVEL": "DEBUG" if log_texts else "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        # One process runs the engine and its worker, as on one GPU. On a CPU vLLM would start two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if frontend is not None:
        environment["VLLM_USE_RUST_FRONTEND"] = "1"
        environment["VLLM_RUST_FRONTEND_PATH"] = str(frontend)
    # Nor does the server share the ledger of engines in this process.
    environment.pop("FASTDRAFT_VLLM_LEDGER", None)
    if ledger is not None:
        environment["FASTDRAFT_VLLM_LEDGER"] = str(ledger)
    if not spawn:
        environment["FORK_WORKERS"] = "1"
    process = forks.start(Path(__file__), *command, variables=environment, log=server.log)
    try:
        for _ in range(600):
            assert process.poll() is None, server.log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health"):
                break
            time.sleep(0.5)
        else:
            raise AssertionError(server.log.read_text()[-4000:])
        yield server
        assert process.poll() is None, server.log.read_text()[-4000:]
    finally:
        process.kill(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill(signal.SIGKILL)


def _serve() -> None:
    """`vllm serve`, which asks for the version of a package that vLLM for CPUs calls otherwise."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if "FORK_WORKERS" in os.environ:
        fork_workers()
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())


if __name__ == "__main__":
    _serve()
