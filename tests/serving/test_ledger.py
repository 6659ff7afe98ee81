"""The counts that pass from engines to the API server, in files that both map."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdraft.serving import ledger as ledgers
from fastdraft.serving.ledger import Ledger, LedgerReader, new_ticket
from programs import run_python


def test_ledger_keeps_the_counts_of_finished_requests(folder: Path) -> None:
    ledger, reader = Ledger(folder), LedgerReader(folder)
    tickets = [new_ticket() for _ in range(3)]
    rows = [ledger.open(ticket) for ticket in tickets]
    for count, row in enumerate(rows):
        ledger.record(row, count, (1 << 32) - 1)
        ledger.close(row)
    assert [reader.prediction_tokens(ticket) for ticket in tickets] == [
        (count, (1 << 32) - 1) for count in range(3)
    ]
    assert reader.prediction_tokens(new_ticket()) is None


def test_ledger_is_bounded_and_running_requests_keep_their_rows(folder: Path) -> None:
    ledger, reader = Ledger(folder), LedgerReader(folder)
    mine = new_ticket()
    running = ledger.open(mine)
    ledger.record(running, 1, 0)
    finished = new_ticket()
    ledger.close(ledger.open(finished))
    for _ in range(20_000):
        ledger.close(ledger.open(new_ticket()))
    ledger.record(running, 2, 0)
    assert reader.prediction_tokens(mine) == (2, 0)
    assert reader.prediction_tokens(finished) is None
    while ledger.open(new_ticket()) is not None:
        pass
    assert reader.prediction_tokens(mine) == (2, 0)
    ledger.close(running)
    assert ledger.open(new_ticket()) == running
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1 << 19


@pytest.mark.parametrize("ticket", [None, 5, "", "0" * 15, "-00000000000000a", "G" * 16, "é" * 16])
def test_ledger_takes_tickets_alone(folder: Path, ticket: object) -> None:
    assert Ledger(folder).open(ticket) is None


def test_engines_are_kept_apart_and_added_up(folder: Path) -> None:
    first, second, reader = Ledger(folder, engine=0), Ledger(folder, engine=1), LedgerReader(folder)
    ticket = new_ticket()
    first.record(first.open(ticket), 3, 1)
    assert reader.prediction_tokens(ticket) == (3, 1)
    second.record(second.open(ticket), 4, 0)
    assert reader.prediction_tokens(ticket) == (7, 1)
    restarted = Ledger(folder, engine=1)
    for ledger, steps in ((first, 1), (second, 2), (restarted, 3)):
        ledger.publish({"steps": steps})
    assert {engine: totals["steps"] for engine, totals in reader.totals().items()} == {
        "0": 1.0,
        "1": 5.0,
    }


def test_ledger_without_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Ledger.from_environment() is None
    assert LedgerReader.from_environment() is None
    monkeypatch.setenv(ledgers.FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert Ledger.from_environment() is None
    reader = LedgerReader.from_environment()
    assert reader is not None
    assert (reader.prediction_tokens(new_ticket()), reader.totals()) == (None, {})
    (tmp_path / "0-1-empty.ledger").touch()
    assert LedgerReader(tmp_path).totals() == {}


NO_ROOM = """
import resource
from fastdraft.serving.ledger import Ledger
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
assert Ledger.from_environment() is None
"""


def test_engine_goes_on_where_there_is_no_room(folder: Path) -> None:
    run_python(NO_ROOM)
    assert LedgerReader(folder).totals() == {}


SERVER = """
import os, subprocess, sys
from fastdraft.serving.ledger import FOLDER_VARIABLE, LedgerReader, share_folder
share_folder()
folder = os.environ[FOLDER_VARIABLE]
share_folder()
assert os.environ[FOLDER_VARIABLE] == folder
reader = LedgerReader.from_environment()
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
print(reader.prediction_tokens("0123456789abcdef"), folder)
"""

ENGINE = """
import os
from fastdraft.serving.ledger import Ledger, share_folder
share_folder()
ledger = Ledger.from_environment()
ledger.record(ledger.open("0123456789abcdef"), 11, 5)
os.kill(os.getpid(), {signal})
"""


@pytest.mark.parametrize("signal", [0, 9])
def test_counts_outlive_the_engine_and_the_folder_ends_with_the_server(signal: int) -> None:
    server = SERVER if signal == 0 else SERVER.replace("check=True", "check=False")
    counts, _, folder = run_python(server, ENGINE.format(signal=signal)).strip().rpartition(" ")
    assert counts == "(11, 5)"
    assert not Path(folder).exists()
