"""Forks, interpreters and signals: what a process does to the core beside calling it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from fastdraft import Datastore, Engine, Memory

KILLED_AFTER = 60  # seconds: only what hangs takes so long


def in_child(body: Callable[[], object]) -> int:
    """The exit status of a fork that calls `body`: 0 unless it raises or hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(KILLED_AFTER)
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forks_do_not_wait_for_what_a_thread_of_their_parent_held() -> None:
    memory, over = Memory(8 << 20), threading.Event()

    def use() -> None:
        memory.of("tenant")[0].add([1, 2, 3])
        memory.forget("tenant")

    def hold() -> None:
        while not over.is_set():
            with memory._lock:
                over.wait(0.01)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert [in_child(use) for _ in range(5)] == [0] * 5
    finally:
        over.set()
        thread.join()
    use()


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=KILLED_AFTER
    )


def test_other_interpreters_of_a_process_are_refused() -> None:
    script = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = '''
try:
    from fastdraft import Engine
except ImportError as error:
    print(error)
'''
interpreters.run_string(interpreters.create(), code)
"""
    result = run(script)
    # numpy refuses some itself, by a message of its own.
    assert "main interpreter" in result.stdout or "interpreter" in result.stderr, result


@pytest.mark.parametrize("call", ["add_request", "add_request(prediction)", "add"])
def test_a_signal_ends_a_long_call(call: str) -> None:
    """Long before the call would end by itself."""
    tokens = np.random.default_rng(0).integers(0, 100_000, 2_000_000)
    engine, store = Engine(), Datastore(max_bytes=1 << 30)
    calls: dict[str, Callable[[], object]] = {
        "add_request": lambda: engine.add_request(tokens),
        "add_request(prediction)": lambda: engine.add_request([1], prediction=tokens),
        "add": lambda: store.add(tokens),
    }

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        # The processor's time, of which the call needs ten times as much, whoever else computes.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert engine.num_requests == 0
    assert engine.num_bytes == 0
    assert len(store) < len(tokens)
    store.add([1, 2, 3])
    engine.finish(engine.add_request([1, 2, 3]))
