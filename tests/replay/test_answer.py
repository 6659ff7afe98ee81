"""The worth of drafts: shares, intervals, costs on GPUs, and the page for a colleague."""

from __future__ import annotations

import json
import random
import re
from html import escape
from pathlib import Path

import numpy as np
import pytest

from command_line import succeed
from fastdraft.replay import FamilyResult, Record, ReplayResult, Trace, replay, settings_of
from fastdraft.replay.answer import (
    LONGEST,
    MOST_TOKENS,
    families_table,
    gpu_table,
    head,
    sentence,
)
from fastdraft.replay.costs import GPUS, MODELS, Model, cost_curve
from fastdraft.replay.results import speed_of
from fastdraft.stats import DraftStats


def result(drafter: str, cost: float, **families: list[tuple[int, int, int]]) -> ReplayResult:
    """families: the steps, emitted and drafted tokens of each session."""
    found = {}
    for name, sessions in families.items():
        steps, emitted, drafted = map(sum, zip(*sessions, strict=True))
        stats = DraftStats(steps, emitted, steps, drafted, emitted - steps)
        counts = np.array(sessions, np.int64)
        found[name] = FamilyResult(len(sessions), stats, (0, 0), 0, counts)
    return ReplayResult(drafter, cost, 16, None, 1, found)


RESULTS = [
    result("default", 0.1, code=[(10, 40, 50), (20, 40, 50)], story=[(20, 20, 0)]),
    result("arctic", 0.1, code=[(20, 40, 100), (20, 40, 100)], story=[(20, 20, 100)]),
]


def test_shares_and_speeds_are_those_by_hand() -> None:
    answer = sentence(RESULTS[0])
    assert answer.startswith("On these 3 calls, one at a time, fastdraft would save 50% of")
    assert f": {100 / (50 + 0.1 * 100):.2f} times as fast" in answer
    [interval] = re.findall(r"interval (\S+) to (\S+)\)", answer)
    low, high = map(float, interval)
    assert 1.0 <= low < 100 / 60 < high <= 2.67  # 40 / (10 + 0.1 * 50)
    assert answer.endswith("where a draft token costs 10.0% of a forward pass.")
    assert sentence(RESULTS[0]) == answer


def test_one_session_says_nothing_about_others() -> None:
    """Its calls are not independent: an interval of no width would promise too much."""
    one = sentence(result("default", 0.0, code=[(10, 40, 50)]))
    assert "4.00 times as fast (of one session: no interval)" in one


def test_equal_requests_have_no_interval() -> None:
    equal = result("default", 0.0, code=[(10, 40, 50)] * 9)
    assert "4.00 times as fast (95 % interval 4.00 to 4.00)" in sentence(equal)


def test_drafters_stand_side_by_side() -> None:
    table = families_table(RESULTS)
    assert [head.replace("\n", " ") for head in table.heads[5:]] == [
        "fastdraft at 10.0%",
        "arctic at 10.0%",
    ]
    assert [row[0] for row in table.rows] == ["code", "story"]
    assert [row[2:4] for row in table.rows] == [("62%", "2.67"), ("0%", "1.00")]
    assert [row[5:] for row in table.rows] == [("2.00", "1.33"), ("1.00", "0.67")]
    assert table.note.endswith("Drafts do not help in story.")


def test_the_mean_of_families_has_an_interval_of_its_own() -> None:
    low, high = RESULTS[0].interval
    # One of the two families always has a speed of 1.
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
            cost = at_once / (operations / bandwidth + at_once)
            assert cost_curve(Model(size), "H100 SXM", at_once, 2) == pytest.approx(
                (1, 1 + cost, 1 + 2 * cost)
            )
    # Half of the weights are experts, and each of two tokens chooses one of two.
    mixture = Model(1e9, experts=1e9, chosen=0.5)
    read = (0.5e9 + 0.75e9) * 2 / bandwidth + 2 * 2 * 1e9 / operations
    plain = (0.5e9 + 0.5e9) * 2 / bandwidth + 2 * 1e9 / operations
    assert cost_curve(mixture, "H100 SXM", 1, 1) == pytest.approx((1, read / plain))
    # 1.49 billion shared parameters and 29 in experts, of which a token reads a sixteenth.
    for model, spread in zip(MODELS["30B-A3B"], (1, 0.75), strict=True):
        times = cost_curve(model, "H100 SXM", 1, 20)
        reads = [1.4875 + 29 * (1 - (15 / 16) ** (n**spread)) for n in range(1, 22)]
        assert times == pytest.approx([each / reads[0] for each in reads], rel=0.05)
        steps = np.diff(times)
        assert (np.diff(steps) < 0).all()  # each further token costs less


def records(count: int, draw: random.Random) -> dict[str, list[Record]]:
    """Requests that repeat their prompt with a few changes."""
    found = []
    for n in range(count):
        prompt = [draw.randrange(1000) for _ in range(80)]
        output = [token if draw.random() < 0.9 else draw.randrange(1000) for token in prompt]
        ids = (np.array(each, np.int32) for each in (prompt, output))
        found.append(Record(str(n), *ids))
    return {"copies": found}


def test_every_gpu_and_mixture_has_a_speed_that_was_replayed() -> None:
    families = records(6, random.Random(1))
    table = gpu_table(families)
    assert [row[0] for row in table.rows] == list(GPUS)
    assert all(
        re.fullmatch(r"\d+\.\d\d( to \d+\.\d\d)?", cell) for row in table.rows for cell in row[1:]
    )
    # The H100's column for a mixture is the run with its curve, by hand.
    bounds = []
    for model in MODELS["30B-A3B"]:
        curve = cost_curve(model, "H100 SXM", 1, LONGEST)
        [run] = replay(settings_of(curve=curve), families)
        trace: list[Trace] = []
        replay(settings_of(curve=curve), families, traced={"copies": set("012345")},
               on_trace=trace.append)  # fmt: skip
        steps = [step for each in trace for step in each.steps]
        time = sum(curve[len(step.token_ids)] for step in steps)
        emitted = sum(len(step.emitted) for step in steps)
        assert run.families["copies"].speed(curve) == pytest.approx(emitted / time)
        bounds.append(f"{emitted / time:.2f}")
    (h100,) = [row for row in table.rows if row[0] == "H100 SXM"]
    assert h100[5] == " to ".join(sorted(bounds))
    # With the default cost it would draft far too much for a mixture.
    [flat] = replay(settings_of(), families)
    [priced] = replay(settings_of(curve=curve), families)
    assert speed_of(flat.priced(curve)) < priced.families["copies"].speed(curve)


def test_a_long_log_is_sampled_for_the_table() -> None:
    families = records(3, random.Random(2))
    long = np.arange(MOST_TOKENS, dtype=np.int32)
    families["long"] = [Record("x", long[:1], long)]
    table = gpu_table(families, ["dense"])
    assert table.note.endswith("Replayed: 3 of the 4 calls.")


def test_the_page_escapes_what_was_recorded() -> None:
    evil = "<script>alert(1)</script>"
    named = result("default", 0.1, **{evil: [(20, 20, 0)]})
    html = head([evil], sentence(named), [families_table([named])])
    assert "<script" not in html and "&lt;script&gt;" in html


def test_the_command_prints_and_writes_the_answer(tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "results.json"
    options = ["--html", str(page), "--json", str(data), "--drafter", "default"]
    done = succeed("replay", "--sample", *options, "--drafter", "prompt-lookup")
    ours, _ = json.loads(data.read_text())["runs"]
    steps, emitted = (
        sum(each[name] for each in ours["families"].values()) for name in ("steps", "emitted")
    )
    first = done.output.strip().splitlines()[0]
    assert f"fastdraft would save {1 - steps / emitted:.0%} of the model's forward passes" in first
    assert '--speculative-config \'{"method": "fastdraft"}\'' in done.output
    text = page.read_text("utf-8")
    assert escape(first) in text and "prompt-lookup" in text and "H100" in text


def test_a_mixture_is_replayed_with_its_curve(tmp_path: Path) -> None:
    data = tmp_path / "results.json"
    options = ["--model", "30B-A3B", "--gpu", "B200", "--json", str(data)]
    done = succeed("replay", "--sample", *options)
    runs = json.loads(data.read_text())["runs"]
    first = [run["curve"][1] - 1 for run in runs]
    assert first == pytest.approx([0.516, 0.356], abs=0.002)
    assert f"the first draft token costs {first[0]:.1%} of a forward pass" in done.output
    assert "dense" not in done.output
