"""What drafts are worth: shares, intervals, costs on GPUs, and the page for a colleague."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fastdraft.cli.app import app
from fastdraft.replay import FamilyResult, ReplayResult, Step, Trace
from fastdraft.replay.answer import gpu_table, html_report, tables, worth_table
from fastdraft.replay.costs import GPUS, MODELS, Model, token_cost
from fastdraft.stats import DraftStats


def result(drafter: str, cost: float, **families: list[tuple[int, int, int]]) -> ReplayResult:
    """Of families with the steps, emitted and drafted tokens of each session."""
    found = {}
    for name, sessions in families.items():
        steps, emitted, drafted = map(sum, zip(*sessions, strict=True))
        stats = DraftStats(steps, emitted, steps, drafted, emitted - steps)
        counts = np.array(sessions, np.int64)
        found[name] = FamilyResult(len(sessions), stats, (0, 0), (0, 0), 0, None, counts)
    return ReplayResult(drafter, cost, 16, None, 1, found)


RESULTS = [
    result("default", 0.1, code=[(10, 40, 50), (20, 40, 50)], story=[(20, 20, 0)]),
    result("arctic", 0.1, code=[(20, 40, 100), (20, 40, 100)], story=[(20, 20, 100)]),
]


def test_shares_and_speeds_are_those_by_hand() -> None:
    (row,) = worth_table(RESULTS).rows
    cost, saved, speed, interval, peer, helpless = row
    assert (cost, saved) == ("10.0%", "50%")  # 50 steps for 100 tokens
    assert speed == f"{100 / (50 + 0.1 * 100):.2f}"
    assert peer == f"{100 / (60 + 0.1 * 300):.2f}"
    assert helpless == "story"
    low, high = map(float, interval.split(" to "))
    assert 1.0 <= low < float(speed) < high <= 2.67  # 40 / (10 + 0.1 * 50)
    assert "3 requests" in worth_table(RESULTS).title
    assert worth_table(RESULTS).rows == [row]


def test_equal_requests_have_no_interval() -> None:
    (row,) = worth_table([result("default", 0.0, code=[(10, 40, 50)] * 9)]).rows
    assert row[2:4] == ("4.00", "4.00 to 4.00")


def test_drafters_stand_side_by_side() -> None:
    titles = [each.title for each in tables(RESULTS)]
    assert titles[:2] == [f"{name}, lookahead 16, token cost 0.1" for name in ("default", "arctic")]
    beside, summary, *answer = list(tables(RESULTS))[2:]
    assert beside.rows == [("code", "2.000", "1.333"), ("story", "1.000", "0.667")]
    worst = [row[:2] + row[3:] for row in summary.rows]
    assert worst == [("default", "0.1", "1.000", "story"), ("arctic", "0.1", "0.667", "story")]
    assert len(answer) == 2
    # Without the default drafter there is no answer.
    assert len(list(tables(RESULTS[1:]))) == 2


def test_the_mean_of_families_has_an_interval_of_its_own() -> None:
    low, high = RESULTS[0].interval
    # Of two families, one always has a speed of 1.
    slow, fast = 40 / (20 + 0.1 * 50), 40 / (10 + 0.1 * 50)
    assert (low, high) == pytest.approx((slow**0.5, fast**0.5))
    assert low < RESULTS[0].geometric_mean < high
    assert (RESULTS[1].worst, RESULTS[1].tokens_per_step) == (20 / 30, {"code": 2.0, "story": 1.0})
    equal = result("default", 0.1, code=[(10, 40, 50)] * 9, story=[(20, 20, 0)] * 3)
    assert equal.interval == pytest.approx((equal.geometric_mean, equal.geometric_mean))


def test_costs_are_those_by_hand() -> None:
    # A weight is read in 2 bytes and used in 2 operations, so the size cancels out.
    bandwidth, operations = GPUS["H100 SXM"]
    for size in (1e9, 70e9):
        for at_once in (1, 16):
            expected = at_once / (operations / bandwidth + at_once)
            assert token_cost(Model(size), "H100 SXM", at_once) == pytest.approx(expected)
    # Half of the weights are experts, and each of two tokens chooses one of two.
    mixture = Model(1e9, experts=1e9, chosen=0.5)
    read = (0.5e9 + 0.75e9) * 2 / bandwidth + 2 * 2 * 1e9 / operations
    plain = (0.5e9 + 0.5e9) * 2 / bandwidth + 2 * 1e9 / operations
    assert token_cost(mixture, "H100 SXM", 1) == pytest.approx(read / plain - 1)


def test_speeds_on_gpus_are_of_runs_that_draft_no_more() -> None:
    rows = gpu_table([result("default", cost, code=[(10, 40, 50)]) for cost in (0.01, 0.004)]).rows
    assert [row[0] for row in rows] == list(GPUS)
    (h100,) = [row for row in rows if row[0] == "H100 SXM"]
    cost = token_cost(MODELS["dense, 16 bits"], "H100 SXM", 1)
    assert cost < 0.004
    assert h100[1] == f"{cost:.1%}, {40 / (10 + cost * 50):.2f}x"
    assert h100[2] == "5.1%"


def test_the_page_escapes_what_was_recorded() -> None:
    evil = "<script>alert(1)</script>"
    trace = Trace(evil, evil, [1], [2], lambda _: evil)
    trace.steps.append(Step([3], [-1], ["context"], None, [0], [3, 4]))
    named = result("default", 0.1, **{evil: [(20, 20, 0)]})
    text = html_report([named], [trace])
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "1 at once" in text and "no help in" in text


def test_the_command_tells_and_writes_the_answer(tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "results.json"
    options = ["--report", str(page), "--json", str(data), "--drafter", "default"]
    done = CliRunner().invoke(app, ["replay", "--sample", *options, "--drafter", "prompt-lookup"])
    assert done.exit_code == 0, done.output
    (ours, theirs) = json.loads(data.read_text())["runs"]
    totals = [
        [sum(each[name] for each in run["families"].values()) for name in ("steps", "emitted")]
        for run in (ours, theirs)
    ]
    (row,) = [line.split() for line in done.output.splitlines() if line.startswith("2.0% ")]
    assert row[1] == f"{1 - totals[0][0] / totals[0][1]:.0%}"
    assert '--speculative-config \'{"method": "fastdraft"}\'' in done.output
    text = page.read_text("utf-8")
    assert text.count("<h3>") == 3 and "prompt-lookup" in text and "H100" in text
