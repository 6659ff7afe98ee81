"""vLLM's part of `make gpu`, rehearsed: real servers of a tiny model on the CPU.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer the tiny model has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import vllm_server
from forks import Forks, fork
from vllm_forks import v2_variables

BENCH = Path(__file__).parents[2] / "bench"


def test_the_part_of_a_gpu_is_rehearsed(words: Path, vllm_v2_forks: Forks, tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    variables = {**v2_variables(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "FORK_WORKERS": "1"}
    variables.pop("FASTDRAFT_VLLM_LEDGER", None)
    arguments = ("--rehearsal", "--model", str(words), "--json", str(file))
    vllm_v2_forks.run(
        Path(__file__), *arguments, variables=variables, log=tmp_path / "log", timeout=400
    )
    found = json.loads(file.read_text())
    assert {"machine", "commit", "command"} <= found.keys()
    proof = found["proof"]
    assert found["correct"] and proof["accepted"] > 0
    assert "Model Runner V2" in proof["drafter"]
    assert [(row["of"], row["answers"], row["wrong"]) for row in proof["answers"]] == [
        *((way, count, 0) for way, count in (("at once", 4), ("one by one", 2), ("remembered", 4))),
        ("control", 2, 0),
    ]
    assert "Model Runner V2" in found["drafters"]["fastdraft-v2"]
    plain, drafted = found["table"]
    assert (plain["method"], drafted["method"]) == ("plain", "fastdraft-v2")
    for row in (plain, drafted):
        assert row["output_throughput"] > 0 and row["equal"] == row["answers"] == 4


class Server:
    """A forked server, as `subprocess.Popen` has one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        python, _, _, *arguments = command
        assert python == sys.executable
        self.pid = fork([vllm_server.__file__, *arguments], dict(environment), str(log))
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a server", seconds)
            time.sleep(0.1)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    sys.path.insert(0, str(BENCH))
    import gpu_vllm
    import serving

    serving.start = Server
    if code := gpu_vllm.main():
        sys.exit(code)


if __name__ == "__main__":
    main()
