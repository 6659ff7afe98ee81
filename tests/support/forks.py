"""Processes that begin with heavy modules imported, each forked from one that imported them.

vLLM alone takes eleven seconds of a core to import, which is more than most of what is tested.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Fork", "Forks", "fork"]


class Forks:
    """A process that imports modules, to fork others from."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """variables: The environment that the modules are imported in."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
        )

    def start(self, script: Path, *arguments: str, variables: Mapping[str, str], log: Path) -> Fork:
        """Runs a script as `python script arguments` would, as the head of a group of processes.

        variables: Its environment.
        log: The file that its output goes to; it works in its folder.
        """
        command = [str(script), *arguments]
        pid = self._ask(command=command, variables=dict(variables), log=str(log))
        return Fork(self, pid)

    def run(
        self, script: Path, *arguments: str, variables: Mapping[str, str], log: Path, timeout: float
    ) -> str:
        """The output of a script, which must succeed."""
        fork = self.start(script, *arguments, variables=variables, log=log)
        try:
            code = fork.wait(timeout)
        finally:
            fork.kill(signal.SIGKILL)
        output = log.read_text()
        assert code == 0, output[-4000:]
        return output

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@dataclass
class Fork:
    forks: Forks
    pid: int
    _code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._code is None:
            self._code = self.forks._ask(pid=self.pid)
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.1)
        return code

    def kill(self, sent: signal.Signals) -> None:
        """Sends a signal to its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sent)


def fork(command: list[str], variables: dict[str, str], log: str) -> int:
    """In the child: runs the script, and does not return."""
    if pid := os.fork():
        return pid
    os.setsid()
    for descriptor, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(name, mode | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(Path(log).parent)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
    return _leave()


def _leave() -> NoReturn:
    """Ends the process, and takes no time to free what was imported."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _main(*modules: str) -> None:
    # Text that modules print is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for name in modules:
            importlib.import_module(name)
        # Else each fork's collector walks all that was imported, and so copies its pages.
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            request = json.loads(line)
            if "pid" in request:
                pid, status = os.waitpid(request["pid"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = fork(**request)
            print(json.dumps(answer), file=answers, flush=True)
    _leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])
