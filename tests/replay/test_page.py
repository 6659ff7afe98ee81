"""The page in a browser, driven in a real one: Debian's chromium, headless."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from command_line import succeed
from fastdraft.replay import Step, Trace
from fastdraft.replay.answer import head
from fastdraft.replay.page import MOST_PROMPT_TOKENS, MOST_TOKENS, choose, page
from fastdraft.replay.records import read_family
from fastdraft.replay.results import Table

HOSTILE = [
    "</script><script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 1'>",
    "<!--",
    "]]>",
    "&lt;b&amp;",
    "\u2028\u2029\x00\x1b",
    "\ud800",
    '"\\',
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root has no sandbox in a container.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page's HTML; the test fails if the page asks for anything else."""
    tab = browser.new_page(viewport={"width": 1280, "height": 1000})
    asked: list[str] = []
    wrong: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: wrong.append(message.text))

    def open_page(html: str, anchor: str = "") -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, "utf-8")
        tab.goto(file.as_uri() + anchor)
        return tab

    yield open_page
    tab.close()
    assert not wrong
    assert {url.partition("#")[0] for url in asked if not url.startswith("data:")} == {
        (tmp_path / "page.html").as_uri()
    }


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def ids_of(text: str) -> list[int]:
    return list(map(ord, text))


def small() -> Trace:
    """Three steps: a tree of which a path of two is accepted, nothing drafted, a refused token."""
    sources = ["context"] * 3 + ["datastore"]
    probabilities = [0.9, 0.8, 0.5, 0.1]
    tree = Step(ids_of("bcdx"), [-1, 0, 1, 0], sources, probabilities, [0, 1], ids_of("bce"))
    nothing = Step([], [], [], None, [], ids_of("f"))
    refused = Step(ids_of("y"), [-1], ["prediction"], None, [], ids_of("g"))
    return Trace("one", "by hand", ids_of("ab"), ids_of("a"), letters, [tree, nothing, refused])


def test_a_person_steps_through_a_request(opened: Any) -> None:
    tab = opened(page([small()], title="Requests", requests=1))
    text = tab.locator("#text")
    assert text.text_content() == "abcefg"
    figures = tab.locator("#figures").inner_text().split("\n")
    assert [each for each in figures if each] == [
        *("Tokens", "6", "Steps of the target", "3", "Tokens a step", "1.67"),
        *("Steps saved", "40%", "Accepted of drafted", "2 of 5"),
    ]
    # It opens at the step that gave most.
    said = tab.locator("#said")
    assert said.text_content() == (
        "Step 1: 4 tokens drafted, 2 accepted: \u201cbc\u201d. The target wrote \u201ce\u201d."
    )
    assert tab.locator("#text .now").all_text_contents() == ["b", "c", "e"]
    assert tab.locator("#text .later").all_text_contents() == ["f", "g"]
    assert tab.locator("#tree g.accepted").count() == 2
    assert tab.locator("#tree g.rejected").count() == 2
    # The branch stands below the path, as far to the right as the token beside it.
    boxes = tab.locator("#tree rect.node")
    at = {
        each.locator("xpath=..").locator("text").first.text_content(): each.bounding_box()
        for each in boxes.all()
    }
    assert at["x"]["x"] == at["c"]["x"] and at["x"]["y"] > at["c"]["y"]
    assert at["a"]["y"] == at["b"]["y"] == at["c"]["y"]
    tab.keyboard.press("ArrowRight")
    assert said.text_content() == "Step 2: Nothing was drafted. The target wrote \u201cf\u201d."
    tab.keyboard.press("End")
    assert said.text_content() == (
        "Step 3: 1 token drafted, none accepted. The target wrote \u201cg\u201d."
    )
    assert tab.locator("#next").is_disabled()
    tab.keyboard.press("Home")
    assert tab.locator("#position").text_content() == "Step 1 of 3"
    assert tab.locator("#previous").is_disabled()
    tab.locator("#next").click()
    assert tab.locator("#position").text_content() == "Step 2 of 3"
    tab.locator("#text span", has_text="g").click()
    assert tab.locator("#position").text_content() == "Step 3 of 3"
    tab.locator("#slider").fill("1")
    assert tab.locator("#position").text_content() == "Step 1 of 3"
    tab.locator("#play").click()
    assert tab.locator("#play").text_content() == "Pause"
    tab.locator("#play", has_text="Play").wait_for()
    assert tab.locator("#position").text_content() == "Step 3 of 3"
    tab.locator("#slider").fill("1")
    rows = tab.locator("#table tbody tr").all_text_contents()
    assert rows[0] == "1bthe textcontext90%accepted"
    assert rows[3] == "4x1datastore10%not accepted"


def test_a_link_leads_to_its_step(opened: Any) -> None:
    two = [small(), small()]
    tab = opened(page(two, title="Requests", requests=2), "#2.3")
    assert tab.locator("#request").input_value() == "1"
    assert tab.locator("#position").text_content() == "Step 3 of 3"
    tab.locator("#request").select_option("0")
    assert tab.evaluate("location.hash") == "#1.1"


def test_hostile_text_stays_text(opened: Any) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(HOSTILE[i] for i in ids)

    every = list(range(len(HOSTILE)))
    step = Step(
        every, [-1, *every[:-1]], ["context"] * len(every), [1.0] * len(every), every, every
    )
    trace = Trace("".join(HOSTILE), "</option>", every, [], decode, [step])
    html = page([trace], title="</title><script>window.bad = 1</script>", requests=1)
    assert html.count("</script>") == 2
    tab = opened(html)
    assert tab.evaluate("window.bad") is None
    # Characters that HTML cannot show are replaced.
    shown = tab.locator("#text").text_content()
    assert shown.startswith("".join(HOSTILE[:5]))
    assert "<script>" in tab.locator("#title").text_content()


def test_screen_readers_and_keys_reach_everything(opened: Any) -> None:
    tab = opened(page([small()], title="Requests", requests=1))
    assert tab.locator("main").count() == tab.locator("header").count() == 1
    assert tab.locator("#said").get_attribute("aria-live") == "polite"
    assert tab.evaluate("document.documentElement.lang") == "en"
    for name in ("First step", "Previous step", "Next step", "Last step"):
        assert tab.get_by_role("button", name=name).count() == 1
    assert tab.get_by_role("slider", name="Step").get_attribute("aria-valuetext") == "Step 1 of 3"
    assert tab.get_by_label("Request").count() == 1
    reached = set()
    for _ in range(20):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"request", "play", "next", "last", "slider", "tree", "SUMMARY"} <= reached


CONTRAST = """() => {
  const lightness = (c) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg, script, style, noscript") || element.disabled) continue;
    if (![...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const a = lightness(parse(getComputedStyle(element).color).slice(0, 3));
    const b = lightness(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_all_text_can_be_read_at_any_width_in_light_and_dark(
    opened: Any, scheme: Any, width: int
) -> None:
    wide = Table(
        "How many times as fast", [f"model {n}\n16 at once" for n in range(9)], [["1.43"] * 9]
    )
    begin = head(["16 model calls", "left out: " + "x" * 300], "On these 16 calls.", [wide, wide])
    html = page([small()], title="Requests", requests=1, head=begin)
    opened(html).emulate_media(color_scheme=scheme)
    tab = opened(html)
    tab.set_viewport_size({"width": width, "height": 900})
    for summary in tab.locator("#head summary").all():
        summary.click()
    for _ in range(3):
        assert tab.evaluate(CONTRAST) == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#head .answer").text_content() == "On these 16 calls."
    assert tab.locator("#text").text_content() == "abcefg"
    # Not by colour alone: the lines below the sources differ too.
    styles = tab.evaluate(
        "['context', 'prediction', 'datastore'].map((name) => { const e = document.createElement"
        "('span'); e.className = 'token ' + name; document.getElementById('text').append(e);"
        "return getComputedStyle(e).borderBottomStyle; })"
    )
    assert styles == ["solid", "dashed", "dotted"]


def test_requests_without_steps_or_without_text_are_shown(opened: Any) -> None:
    tab = opened(page([Trace("one", "by hand", [97], [98], letters)], title="x", requests=1))
    assert tab.locator("#text").text_content() == "b"
    assert tab.locator("#said").text_content() == "The prefill emitted the whole answer."
    trace = small()
    ids = Trace(trace.name, trace.title, trace.prompt_ids, trace.first_ids, None, trace.steps)
    tab = opened(page([ids], title="x", requests=1))
    assert tab.locator("#text").text_content() == "97 98 99 101 102 103"


def test_the_size_is_bounded_and_what_is_left_out_is_said(opened: Any, tmp_path: Path) -> None:
    size = 5_000
    steps = [Step([1] * 3, [-1, 0, 1], ["context"] * 3, [0.5] * 3, [0, 1, 2], [1, 1, 1, 2])] * size
    long = Trace("long", "by hand", [3] * (MOST_PROMPT_TOKENS + 7), [1], letters, steps)
    html = page([long], title="Requests", requests=900)
    assert len(html) < 4_000_000
    tab = opened(html)
    assert "shows 1 of 900 requests" in tab.locator("#title").text_content()
    cut = tab.locator("#cut").text_content()
    left = size - (MOST_TOKENS - 1) // 4
    assert f"The last {left:,} steps of this request are left out" in cut
    assert "The first 7 tokens of its prompt are left out" in cut

    lines = [{"id": str(n), "prompt_ids": [1], "output_ids": [2] * 100} for n in range(5)]
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = read_family(file, lambda _: [])
    # A round over the families at a time, and always one request.
    assert choose({"a": records, "b": records[:1]}, 350) == {"a": {"0", "1"}, "b": {"0"}}
    assert choose({"a": records}, 10) == {"a": {"0"}}
    # One that does not fit leaves room for later ones.
    file.write_text(json.dumps({"id": "long", "prompt_ids": [1], "output_ids": [2] * 400}))
    long = read_family(file, lambda _: [])
    assert choose({"l": long, "b": records[:1]}, 350) == {"l": set(), "b": {"0"}}


def test_commands_write_the_page(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    succeed("replay", "--sample", "--html", file)
    tab = opened(file.read_text("utf-8"))
    options = tab.locator("#request option").all_text_contents()
    assert len(options) == 15
    groups = tab.locator("#request optgroup")
    assert groups.first.get_attribute("label") == "code_edit, default, token cost 0.02"
    assert tab.locator("#text").text_content().startswith("\n        self.load()")
    counts = re.findall(r"\d+", tab.locator("#legend").inner_text())
    assert sum(map(int, counts)) == int(tab.locator("#figures dd").first.inner_text())


def test_works_from_a_file_without_a_network() -> None:
    template = page([], title="x", requests=0)
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", template)
    assert "default-src 'none'" in template
