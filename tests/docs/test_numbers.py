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
        ("fastdraft, trees", "replay_trees", "default"),
        ("fastdraft, chains", "replay", "default"),
        ("fastdraft, 16 requests at once", "replay_at_once_16", "default"),
        ("fastdraft, 64 requests at once", "replay_at_once_64", "default"),
        ("Arctic suffix decoding 0.3.0, local and", "replay", "arctic"),
        ("Arctic suffix decoding 0.3.0, local tree", "replay", "arctic-local"),
        ("vLLM's n-gram", "replay", "vllm"),
        ("transformers' prompt lookup", "replay", "transformers"),
    ],
)
def test_draft_quality(beginning: str, name: str, drafter: str) -> None:
    page = ROOT / "docs" / "benchmarks" / "quality.md"
    assert row_of(page, beginning) == quality(name, drafter)


def test_no_peer_is_ahead_in_any_cell() -> None:
    """What two pages say of the 384 cells of family, token cost and peer."""
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
    assert f"{max(parts):.3f}" == "0.994"


def test_the_stairs() -> None:
    page = ROOT / "docs" / "explanation" / "step-cost.md"
    expected = [
        [
            str(row["at_once"]),
            str(row["prompt_tokens"]),
            f"{row['learned']:.0f}",
            f"{row['oracle']:.0f}",
            f"{row['of_oracle']:.3f}",
            f"{row['smooth_of_oracle']:.3f}",
        ]
        for row in results("stairs")["rows"]
    ]
    rows = [row for row in rows_of(page) if len(row) == len(expected[0])]
    assert rows[1:] == expected


def test_drafts_behind_long_texts() -> None:
    forwards = {(row["context"], row["width"]): row for row in results("long_context")["forwards"]}
    rows = rows_of(ROOT / "docs" / "explanation" / "step-cost.md")
    for tokens in (256, 2_048, 8_192):
        one, drafts = forwards[tokens, 1], forwards[tokens, 5]
        assert [
            f"{tokens:,}",
            f"{one['fastdraft_ms']:.0f}",
            f"{drafts['sdpa_to_one']:.2f}",
            f"{drafts['fastdraft_to_one']:.2f}",
        ] in rows


def test_the_front_page() -> None:
    front = ROOT / "README.md"
    assert row_of(front, "modelled speed") == [
        "1.00",
        f"{quality('replay', 'arctic')[1]} (Arctic)",
        quality("replay", "default")[1],
    ]
    propose = {
        row["name"]: row["propose"]["p50_us"]
        for row in results("index")["rows"]
        if row["context"] == 100_000
    }
    assert row_of(front, "proposing") == [
        "",
        f"{propose['Arctic suffix decoding, local tree']:.1f} µs (Arctic)",
        f"{propose['fastdraft']:.1f} µs",
    ]
    requests = {each["name"]: each["modes"] for each in results("demo")["requests"]}
    for beginning, name in (("rewriting a file", "edit"), ("telling a story", "story")):
        plain, lookup, ours = (
            f"{requests[name][mode]['tokens_per_second']:.1f}"
            for mode in ("plain", "prompt_lookup", "fastdraft")
        )
        assert row_of(front, beginning) == [plain, f"{lookup} (prompt lookup)", ours]
    (live,) = [each for each in results("serving_live")["rows"] if each["rows"] == 16]
    suffix, ours = (f"{live[name]['relative_seconds'][0]:.2f}" for name in ("suffix", "fastdraft"))
    assert row_of(front, "vLLM, 16 requests") == ["1.00", f"{suffix} (Arctic)", ours]


def test_what_each_source_adds() -> None:
    means = {each["drafts"]: each["gains"] for each in results("sources")["means"]}
    page = ROOT / "docs" / "benchmarks" / "quality.md"
    cells: dict[str, list[str]] = {}
    for drafts in ("chains, 1 at once", "trees, 64 at once"):
        known = {each["source"]: each for each in means[drafts]}
        for each in means["trees, 64 at once"]:
            row = cells.setdefault(each["source"], [str(each["families"])])
            for cost in ("0.003", "0.02", "0.05", "0.2"):
                figures = known.get(each["source"], {}).get(cost)
                mean, worst = figures.split(" / ")[:2] if figures else ("", "")
                row.append(f"{float(mean):.2f} / {float(worst):.2f}" if mean else "")
    for source, row in cells.items():
        assert [source, *row] in rows_of(page)


def test_what_block_verification_keeps() -> None:
    cells: dict[int, list[str]] = {}
    for each in results("block_verification")["rows"]:
        more = f"{each['more']:.3f} ± {each['standard error']:.3f}" if each["gamma"] > 1 else "0"
        text = f"{each['by token']:.3f} / {each['by block']:.3f}, {more}"
        cells.setdefault(each["gamma"], []).append(text)
    page = ROOT / "docs" / "benchmarks" / "generation.md"
    for gamma, row in cells.items():
        assert [str(gamma), *row] in rows_of(page)


def test_rows_that_end_early() -> None:
    page = ROOT / "docs" / "benchmarks" / "generation.md"
    for each in results("ending_rows")["rows"]:
        ours = f"{each['loop']}, rows {each['rows']}"
        loop = "plain `generate`" if each["loop"] == "plain" else ours
        assert [
            f"compiled, {loop}" if each["compiled"] else loop,
            str(each["compilations"]),
            f"{each['first_s']:.1f}",
            f"{each['all_s']:.1f}",
            f"{each['compiled_s']:.2f}",
        ] in rows_of(page)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.name)
def test_results_name_machine_commit_and_command(page: Path) -> None:
    named = re.findall(r"bench/results/(\w+)\.json", page.read_text())
    for name in named:
        assert {"machine", "commit", "command"} <= results(name).keys(), name


def pinned(host: str, package: str) -> str:
    """The version that a host's tests install."""
    text = (ROOT / "tests" / "hosts" / "requirements" / f"{host}.txt").read_text()
    (version,) = re.findall(rf"^{package}(?:\[\w+\])?==([\d.]+)", text, re.MULTILINE)
    return str(version)


@pytest.mark.parametrize(
    ("host", "package", "guide"),
    [
        ("vllm", "vllm(?:-cpu)?", "vllm.md"),
        ("sglang", "sglang", "sglang.md"),
        ("llama-cpp", "llama-cpp-python", "llama-cpp.md"),
    ],
)
def test_the_pages_name_the_tested_versions(host: str, package: str, guide: str) -> None:
    version = pinned(host, package).removesuffix(".0")
    (front,) = [
        row for row in rows_of(ROOT / "README.md") if f"({'docs/guides/' + guide})" in row[0]
    ]
    (loop,) = [
        row
        for row in rows_of(ROOT / "docs" / "guides" / "your-own-loop.md")
        if f"({guide})" in row[1]
    ]
    for text in (front[2], loop[2], (ROOT / "docs" / "guides" / guide).read_text()):
        assert re.search(rf"\b{re.escape(version)}\b", text), text
